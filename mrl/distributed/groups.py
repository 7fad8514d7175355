"""Process groups of the parallel layout, as one bundle from which every collective takes its group.

Megatron creates the actor's groups (`megatron/parallel_state.py`); this file creates those of rollout replicas and
roles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mrl.distributed.subset_groups import use_as_world
from mrl.parallel_layout import Coords, ParallelLayout


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of this rank; a group of a role that the rank does not have contains this rank alone.

    Attributes:
        rank: Global rank.
        grid: Parallel layout of all ranks.
        tp: Tensor-parallel group: ranks with other shards of the same layers.
        cp: Context-parallel group: ranks with other chunks of the same sequences.
        dp: Data-parallel group: ranks with the same shard and other sequences.
        dp_cp: Data- and context-parallel group: ranks with the same shard and other tokens.
        pp: Pipeline stages of this rank's replica of the actor.
        rollout_tp: Ranks of this rank's rollout replica.
        trainers: Ranks that train, if others sample (disaggregated); None: all ranks do both.
        samplers: Ranks that sample, if others train; None: all ranks do both.
    """

    rank: int
    grid: ParallelLayout
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    rollout_tp: dist.ProcessGroup
    trainers: dist.ProcessGroup | None = None
    samplers: dist.ProcessGroup | None = None

    @property
    def is_trainer(self) -> bool:
        """True if this rank has a shard of the actor."""
        return self.rank in self.grid.trainers

    @property
    def is_sampler(self) -> bool:
        """True if this rank has a shard of a rollout engine."""
        return self.rank in self.grid.samplers

    def trainers_as_world(self) -> AbstractContextManager[None]:
        """Makes the training ranks the default process group inside a `with` block; call it on training ranks."""
        return use_as_world(self.trainers)

    @property
    def coords(self) -> Coords:
        """Position of this rank, which must train, in the actor's parallel layout."""
        return self.grid.coords(self.rank)

    @property
    def is_replica_leader(self) -> bool:
        """True if this rank is the first of its rollout replica, which scores and sends the replica's rollouts."""
        return self.is_sampler and self.grid.rollout_rank(self.rank) == 0


def make_rollout_group(grid: ParallelLayout, rank: int) -> dist.ProcessGroup:
    """Collective over all ranks: creates each replica's group; returns this rank's (itself alone if it only trains)."""
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
        raise RuntimeError(f"rank {rank} samples but belongs to no rollout replica of {grid}")
    return single_rank_group(rank)


def make_role_groups(
    grid: ParallelLayout, timeout_s: float, sampling_timeout_s: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Collective over all ranks: creates the groups (trainers, samplers); (None, None) if all ranks do both.

    Args:
        grid: Parallel layout of all ranks.
        timeout_s: Timeout of collectives among training ranks, s.
        sampling_timeout_s: Timeout of collectives among sampling ranks, s.
    """
    if not grid.has_separate_rollout:
        return None, None
    trainers = dist.new_group(list(grid.trainers), timeout=timedelta(seconds=timeout_s))
    return trainers, dist.new_group(list(grid.samplers), timeout=timedelta(seconds=sampling_timeout_s))


def single_rank_group(rank: int) -> dist.ProcessGroup:
    """Returns a new group of this rank only; other ranks need not call it."""
    made: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return made
