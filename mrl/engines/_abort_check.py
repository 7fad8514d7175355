"""Whether a generation is to be abandoned, asked between its forwards.

Owns the agreement of a replica's ranks: they decode together, so all of them leave after the same step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mrl.distributed.collectives import any_rank

STEPS = 16
"""Forwards between two questions to the other ranks of the replica."""


class Poll:
    """Collective over the replica: each call answers the same on all its ranks.

    Args:
        told: Whether this rank was told to stop.
        group: Ranks of the replica; None: this rank alone.
        sampled: Called each time: a forward was made.
    """

    def __init__(
        self, told: Callable[[], bool], group: dist.ProcessGroup | None, sampled: Callable[[], object]
    ) -> None:
        self._told, self._sampled = told, sampled
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._num_calls = 0

    def __call__(self) -> bool:
        """Asks this rank at each call, the others at every `STEPS`th; true once any was told."""
        self._sampled()
        if self._group is None:
            return self._told()
        self._num_calls += 1
        if self._num_calls % STEPS:
            return False
        return any_rank(self._told(), self._group)
