"""Messages between pipeline stages, whose shapes every stage knows beforehand.

All stages of a data-parallel index hold the same microbatches. So a stage need not ask its neighbour how long the next
one is: Megatron would send three numbers before every message and wait for the device twice. Messages of either
direction come in the order of the microbatches, except in an interleaved schedule: there Megatron's way is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

NOTHING = [0, 0, 0]


class Pipeline(P2PCommunicator):  # type: ignore[misc]  # megatron.core has no types
    """Sends and receives of one run through the stages.

    Args:
        group: The pipeline.
        config: Megatron's, of this rank's chunks.
        lengths: Tokens of each microbatch on this rank.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> None:
        super().__init__(group, config)
        cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[length // cut, 1, config.hidden_size] for length in lengths]
        self._forward, self._backward = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(self._forward) if recv_prev else NOTHING, next(self._backward) if recv_next else NOTHING


def messages(group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """What Megatron's `forward_backward_func` is given of a pipeline; nothing where it is to find that out itself.

    Args:
        group: The pipeline.
        config: Megatron's, of this rank's chunks.
        lengths: Tokens of each microbatch on this rank.
    """
    if group.size() == 1 or config.virtual_pipeline_model_parallel_size is not None:
        return {}
    # a schedule that is given the one asks for the other
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    return {"p2p_communicator": Pipeline(group, config, lengths), "pg_collection": groups}
