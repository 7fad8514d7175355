"""Point-to-point communication between pipeline stages, with shapes that every stage knows in advance.

All stages of a data-parallel index have the same microbatches, so a stage need not ask its neighbour for the next one's
length: Megatron would send three numbers before every tensor and synchronise with the device twice. Tensors of either
direction arrive in the order of the schedule's own table (`get_schedule_table`).

An interleaved schedule frees an output (`deallocate_pipeline_outputs` replaces its `.data`) while its asynchronous
send may still be running. A detached tensor, which shares the storage, is sent instead, so the storage lives until the
send is done. Megatron's own exchange of shapes hides this race: it delays the schedule until the data has usually left.

The schedule also discards the handles of its last sends. Gloo cancels a send whose handle is deleted before the
receiver has posted its receive, and the receiver hangs; so the handles are kept until the sends are done.
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
"""Shape that Megatron ignores, in a direction without a receive."""


class Pipeline(P2PCommunicator):  # type: ignore[misc]  # megatron.core has no types
    """Point-to-point communicator of one run through the stages.

    Args:
        group: Pipeline-parallel group.
        config: Megatron's config of this rank's chunks.
        lengths: Tokens of each microbatch on this rank.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> None:
        super().__init__(group, config)
        sequence_shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[length // sequence_shards, 1, config.hidden_size] for length in lengths]
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage or len(shapes))
        every = [shapes[microbatch] for microbatch, _ in table]
        # interleaved: the last stage sends outputs of all chunks but the last to the first stage, gradients vice versa
        wrapped_around = [shapes[microbatch] for microbatch, chunk in table if chunk < chunks - 1]
        self._forward = iter(wrapped_around if group.rank() == 0 else every)
        self._backward = iter(wrapped_around if group.rank() == group.size() - 1 else every)
        self._sends: list[dist.Work] = []

    def finish(self) -> None:
        """Waits until all sends are done."""
        for send in self._sends:
            if not send.is_completed():  # gloo hangs if a request is waited for twice
                send.wait()
        self._sends.clear()

    def _communicate(self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **given: Any) -> Any:
        """Sends detached tensors, which the schedule cannot free, and keeps the requests, which it drops."""
        from_prev, from_next, requests = super()._communicate(
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            **given,
        )
        if isinstance(requests, dict):  # asynchronous sends and receives, by name
            self._sends = [send for send in self._sends if not send.is_completed()]
            self._sends += [requests[name] for name in ("send_next", "send_prev") if name in requests]
        return from_prev, from_next, requests

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return next(self._forward) if recv_prev else NOTHING, next(self._backward) if recv_next else NOTHING


@contextmanager
def messages(group: dist.ProcessGroup, config: Any, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields the communication arguments for Megatron's `forward_backward_func`; none without pipeline parallelism.

    All sends are done at the end of the context.

    Args:
        group: Pipeline-parallel group.
        config: Megatron's config of this rank's chunks.
        lengths: Tokens of each microbatch on this rank.
    """
    if group.size() == 1:
        yield {}
        return
    # a schedule with its own communicator also requires the groups
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    pipeline = Pipeline(group, config, lengths)
    yield {"p2p_communicator": pipeline, "pg_collection": groups}
    pipeline.finish()
