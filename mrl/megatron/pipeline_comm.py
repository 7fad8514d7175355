"""Messages between pipeline stages, whose shapes every stage knows beforehand.

All stages of a data-parallel index hold the same microbatches. So a stage need not ask its neighbour how long the next
one is: Megatron would send three numbers before every message and wait for the device twice. Messages of either
direction come in the order of the schedule's own table (`get_schedule_table`).

An interleaved schedule sends while it computes, and empties an output (`deallocate_pipeline_outputs`) before it has
waited for its send. What the process group holds of a message is the tensor it was given, not the memory that it had;
so it is given one that nobody empties. Megatron's exchange of numbers only made it likely that the bytes had left.

The schedule also lets go of its last sends without waiting for them. Gloo forgets a message whose request is gone
before the receiver asked for it, and the receiver waits for ever; so requests are kept until they are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
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
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage or len(shapes))
        every = [shapes[microbatch] for microbatch, _ in table]
        # an end of the pipeline gets what the other end hands back, and that is done with its last chunk's
        handed_back = [shapes[microbatch] for microbatch, chunk in table if chunk < chunks - 1]
        self._forward = iter(handed_back if group.rank() == 0 else every)
        self._backward = iter(handed_back if group.rank() == group.size() - 1 else every)
        self._sends: list[dist.Work] = []

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for send in self._sends:
            if not send.is_completed():  # gloo waits for ever for one that was waited for
                send.wait()
        self._sends.clear()

    def _communicate(self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **given: Any) -> Any:
        """Sends what the schedule may empty, and forget, meanwhile."""
        from_prev, from_next, requests = super()._communicate(
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            **given,
        )
        if isinstance(requests, dict):  # by name, where they are not waited for
            self._sends = [send for send in self._sends if not send.is_completed()]
            self._sends += [requests[name] for name in ("send_next", "send_prev") if name in requests]
        return from_prev, from_next, requests

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(self._forward) if recv_prev else NOTHING, next(self._backward) if recv_next else NOTHING


@contextmanager
def messages(group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What Megatron's `forward_backward_func` is given of a pipeline; nothing where there is none.

    At the end of the context all messages have left.

    Args:
        group: The pipeline.
        config: Megatron's, of this rank's chunks.
        lengths: Tokens of each microbatch on this rank.
    """
    if group.size() == 1:
        yield {}
        return
    # a schedule that is given the one asks for the other
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    pipeline = Pipeline(group, config, lengths)
    yield {"p2p_communicator": pipeline, "pg_collection": groups}
    pipeline.finish()
