"""Which rank sits where: pure arithmetic between ranks and (tp, dp, pp) coordinates.

Owns the order of ranks that Megatron-Core uses by default ("tp-cp-ep-dp-pp": TP varies fastest, PP slowest) and the
rollout replicas (consecutive ranks). It knows no process group: `distributed/groups.py` makes those from it, and
`weights/` computes every rank's layout from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coords:
    """Position of one rank: tensor, data and pipeline index."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Grid:
    """The parallel layout of the actor and of the rollout replicas over `world_size` ranks.

    Attributes:
        world_size: Ranks in the job.
        tp: Tensor-model-parallel size of the actor.
        pp: Pipeline-model-parallel size of the actor.
        vpp: Model chunks per pipeline stage (virtual pipeline), 1 without.
        rollout_tp: Tensor-parallel size of a rollout replica.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    rollout_tp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size of the actor."""
        return self.world_size // (self.tp * self.pp)

    @property
    def num_replicas(self) -> int:
        """Rollout replicas."""
        return self.world_size // self.rollout_tp

    def coords(self, rank: int) -> Coords:
        """Actor coordinates of a rank."""
        return Coords(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, coords: Coords) -> int:
        """Rank at the given actor coordinates."""
        return coords.tp + self.tp * (coords.dp + self.dp * coords.pp)

    def replica(self, rank: int) -> int:
        """Rollout replica of a rank."""
        return rank // self.rollout_tp

    def rollout_tp_rank(self, rank: int) -> int:
        """Position of a rank inside its rollout replica."""
        return rank % self.rollout_tp

    def data_ranks(self, dp: int) -> list[int]:
        """All ranks (every tp and pp) that train on the data of data-parallel index `dp`."""
        return [rank for rank in range(self.world_size) if self.coords(rank).dp == dp]
