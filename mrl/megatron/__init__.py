"""Everything that imports Megatron-Core: actor, critic, optimizer, pipeline schedule, router replay, offloading.

The one folder that imports megatron.core. Importing it corrects megatron-core for this machine first
(`megatron/cpu/import_patches.py`): after megatron is imported it is too late.
"""

import logging
import warnings

import torch

from mrl.megatron.cpu.import_patches import prepare


def quieten() -> None:
    """Megatron warns that optional packages are not installed and of names that torch has deprecated, on every rank.

    And of a folder that is not empty, where it sees what faster ranks have begun to write: a folder is made new for
    every save.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron)\.")
    logging.getLogger("megatron.core.dist_checkpointing.serialization").addFilter(
        lambda record: "Overwriting old incomplete" not in record.getMessage()
    )


quieten()
prepare("cuda" if torch.cuda.is_available() else "cpu")
