"""Positions of ranks: arithmetic between global ranks and their parallel coordinates, without process groups.

The order of the actor's ranks is Megatron-Core's default ("tp-cp-ep-dp-pp": TP changes fastest, PP slowest; for experts
a stage's ranks are split again, by (etp, ep, edp)). Rollout replicas are consecutive ranks; inside one, neighbours have
different experts first and parts of the same expert second, as in TensorRT-LLM's `Mapping`. With separate rollout
ranks, these are the last ones of the job and the actor uses the others. `distributed/groups.py` makes process groups
from it; `resharding/` computes every rank's layout from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Coords:
    """Tensor, context, data and pipeline index of one rank, for everything except the experts."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True)
class ExpertCoords:
    """Tensor, expert and data index of one rank, for the experts."""

    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel layout of the actor and of the rollout replicas over `world_size` ranks.

    Attributes:
        world_size: Ranks in the job.
        tp: Tensor-model-parallel size of the actor.
        pp: Pipeline-model-parallel size of the actor.
        vpp: Model chunks per pipeline stage (virtual pipeline); 1 without.
        cp: Context-parallel size of the actor.
        ep: Expert-parallel size of the actor.
        etp: Tensor-parallel size of the actor's experts; None: `tp`.
        first_stage_layers: Layers of the first pipeline stage; None: as many as the others.
        last_stage_layers: Layers of the last pipeline stage; None: as many as the others.
        rollout_tp: Tensor-parallel size of a rollout replica.
        rollout_ep: Expert-parallel size inside a rollout replica; a divisor of `rollout_tp`.
        rollout_pp: Pipeline stages of a rollout replica; tensor-parallel ranks are consecutive, as in TensorRT-LLM.
        rollout_ranks: Number of separate rollout ranks, the last ones of the job; 0: all ranks train and sample.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    rollout_tp: int = 1
    rollout_ep: int = 1
    rollout_pp: int = 1
    rollout_ranks: int = 0

    @property
    def has_separate_rollout(self) -> bool:
        """True if training and rollout run on separate ranks."""
        return self.rollout_ranks > 0

    @property
    def trainers(self) -> range:
        """Ranks that have the actor."""
        return range(self.world_size - self.rollout_ranks)

    @property
    def samplers(self) -> range:
        """Ranks that have the engine."""
        return range(len(self.trainers) if self.has_separate_rollout else 0, self.world_size)

    @property
    def dp(self) -> int:
        """Data-parallel size of the actor."""
        return len(self.trainers) // (self.tp * self.cp * self.pp)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the actor's experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def rollout_size(self) -> int:
        """Ranks of a rollout replica."""
        return self.rollout_tp * self.rollout_pp

    @property
    def num_replicas(self) -> int:
        """Number of rollout replicas."""
        return len(self.samplers) // self.rollout_size

    @property
    def rollout_moe_tp(self) -> int:
        """Ranks that share each expert inside a rollout replica."""
        return self.rollout_tp // self.rollout_ep

    @property
    def min_world_size(self) -> int:
        """Smallest world size that these parallel sizes allow."""
        experts = self.ep * self.expert_tp * self.pp
        actor = math.lcm(self.tp * self.cp * self.pp, experts)
        return actor + self.rollout_ranks if self.has_separate_rollout else math.lcm(actor, self.rollout_size)

    def coords(self, rank: int) -> Coords:
        """Returns the actor coordinates of a rank that trains."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp=tp, dp=dp, pp=pp, cp=cp)

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Returns the expert coordinates of a rank that trains."""
        rest, etp = divmod(rank % (len(self.trainers) // self.pp), self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoords(etp=etp, ep=ep, edp=edp)

    def rank(self, coords: Coords) -> int:
        """Returns the rank at the given actor coordinates."""
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    def replica(self, rank: int) -> int:
        """Returns the index of the rollout replica of a rank that samples."""
        return (rank - self.samplers.start) // self.rollout_size

    def rollout_rank(self, rank: int) -> int:
        """Returns the position of a rank inside its rollout replica."""
        return (rank - self.samplers.start) % self.rollout_size

    def rollout_tp_rank(self, rank: int) -> int:
        """Returns the tensor-parallel position of a rank inside its rollout replica."""
        return (rank - self.samplers.start) % self.rollout_tp
