"""The process groups of the parallel layout, by name.

Owns the bundle `ProcessGroups` that every collective takes its group from, the groups of the rollout replicas, and that
of the ranks that train. The actor's groups are made by Megatron (`megatron/parallel_state.py`) and put in here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mrl.distributed.subworld import as_whole_job
from mrl.parallel_layout import Coords, Grid


@dataclass(frozen=True)
class ProcessGroups:
    """Groups that this rank belongs to; those of a role that it does not have are itself alone.

    Attributes:
        rank: Global rank.
        grid: Layout of all ranks.
        tp: Ranks that share this rank's layers.
        cp: Ranks that share this rank's sequences.
        dp: Ranks that hold the same shard for other data.
        dp_cp: Ranks that hold the same shard for other tokens.
        pp: Pipeline stages of this rank's replica of the actor.
        rollout_tp: Ranks of this rank's rollout replica.
        trainers: Ranks that train, where others sample; None: all ranks do both.
        samplers: Ranks that sample, where others train; None: all ranks do both.
    """

    rank: int
    grid: Grid
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    rollout_tp: dist.ProcessGroup
    trainers: dist.ProcessGroup | None = None
    samplers: dist.ProcessGroup | None = None

    @property
    def trains(self) -> bool:
        """Whether this rank holds a part of the actor."""
        return self.rank in self.grid.trainers

    @property
    def samples(self) -> bool:
        """Whether this rank holds a part of an engine."""
        return self.rank in self.grid.samplers

    def among_trainers(self) -> AbstractContextManager[None]:
        """Inside, on ranks that train, these are all ranks of the job for whatever asks."""
        return as_whole_job(self.trainers)

    @property
    def coords(self) -> Coords:
        """Actor coordinates of this rank, which trains."""
        return self.grid.coords(self.rank)

    @property
    def leads_replica(self) -> bool:
        """Whether this rank is the first of its rollout replica: it scores and sends the replica's rollouts."""
        return self.samples and self.grid.rollout_rank(self.rank) == 0


def make_rollout_group(grid: Grid, rank: int) -> dist.ProcessGroup:
    """Collective over the job: the group of this rank's rollout replica; of itself alone where it does not sample."""
    own: dist.ProcessGroup | None = None
    for replica in range(grid.num_replicas):
        start = grid.samplers.start + replica * grid.rollout_size
        ranks = list(range(start, start + grid.rollout_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            own = group
    if own is not None:
        return own
    if rank in grid.samplers:
        raise RuntimeError(f"rank {rank} is in no rollout replica of {grid}")
    return alone(rank)


def make_role_groups(
    grid: Grid, timeout_s: float, sampling_s: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Collective over the job: the groups of the ranks that train and of those that sample; None where all do both.

    Args:
        grid: The layout.
        timeout_s: A collective of the ranks that train that waits longer fails, s.
        sampling_s: One of those that sample.
    """
    if not grid.has_roles:
        return None, None
    trainers = dist.new_group(list(grid.trainers), timeout=timedelta(seconds=timeout_s))
    return trainers, dist.new_group(list(grid.samplers), timeout=timedelta(seconds=sampling_s))


def alone(rank: int) -> dist.ProcessGroup:
    """A group of this rank; no other rank takes part."""
    made: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return made
