"""The process groups of the parallel layout, by name.

Owns the bundle `ProcessGroups` that every collective takes its group from, and the groups of the rollout replicas. The
actor's groups are made by Megatron (`megatron/parallel.py`) and put in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from mrl.grid import Coords, Grid


@dataclass(frozen=True)
class ProcessGroups:
    """Groups that this rank belongs to.

    Attributes:
        rank: Global rank.
        grid: Layout of all ranks.
        tp: Ranks that share this rank's layers.
        cp: Ranks that share this rank's sequences.
        dp: Ranks that hold the same shard for other data.
        dp_cp: Ranks that hold the same shard for other tokens.
        pp: Pipeline stages of this rank's replica of the actor.
        rollout_tp: Ranks of this rank's rollout replica.
    """

    rank: int
    grid: Grid
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    rollout_tp: dist.ProcessGroup

    @property
    def coords(self) -> Coords:
        """Actor coordinates of this rank."""
        return self.grid.coords(self.rank)

    @property
    def leads_replica(self) -> bool:
        """Whether this rank is the first of its rollout replica: it scores and sends the replica's rollouts."""
        return self.grid.rollout_rank(self.rank) == 0


def make_rollout_group(grid: Grid, rank: int) -> dist.ProcessGroup:
    """Collective over the job: the group of this rank's rollout replica."""
    own: dist.ProcessGroup | None = None
    for replica in range(grid.num_replicas):
        ranks = list(range(replica * grid.rollout_size, (replica + 1) * grid.rollout_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            own = group
    if own is None:
        raise RuntimeError(f"rank {rank} is in no rollout replica of {grid}")
    return own
