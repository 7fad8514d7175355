"""Polling for an abort request between the forwards of a generation.

The ranks of a replica decode together, so they must agree and all return after the same step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mrl.distributed.collectives import any_rank

CHECK_INTERVAL = 16
"""Forwards between two all-reduces of the replica."""


class AbortCheck:
    """Poll whether any rank of the replica requested an abort; the same answer on all of its ranks.

    Args:
        abort_requested: Returns whether an abort was requested on this rank.
        group: Ranks of the replica; None: a replica of one rank.
        on_forward: Progress callback, called at each poll.
    """

    def __init__(
        self, abort_requested: Callable[[], bool], group: dist.ProcessGroup | None, on_forward: Callable[[], object]
    ) -> None:
        self._abort_requested, self._on_forward = abort_requested, on_forward
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._num_calls = 0

    def __call__(self) -> bool:
        """Returns whether an abort was requested on any rank; collective at every `CHECK_INTERVAL`-th call."""
        self._on_forward()
        if self._group is None:
            return self._abort_requested()
        self._num_calls += 1
        if self._num_calls % CHECK_INTERVAL:
            return False
        return any_rank(self._abort_requested(), self._group)
