"""The one folder that imports megatron.core: actor, reference, schedules, checkpoints.

Importing it corrects megatron-core for this machine first (`distributed/device.py`): after megatron is imported it is
too late.
"""

import torch

from mrl.distributed.device import prepare

prepare("cuda" if torch.cuda.is_available() else "cpu")
