"""Which rank sits where: pure arithmetic between ranks and their parallel coordinates.

Owns the order of ranks that Megatron-Core uses by default ("tp-cp-ep-dp-pp": TP varies fastest, PP slowest; a stage's
ranks are cut anew, by (etp, ep, edp), for the experts) and the rollout replicas (consecutive ranks; inside one, experts
are spread first and cut second, as in TensorRT-LLM's `Mapping`). Where rollouts have ranks of their own, these are the
last ones of the job, and the actor's layout is that of the others. It knows no process group: `distributed/groups.py`
makes those from it, and `resharding/` computes every rank's layout from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Coords:
    """Position of one rank for everything but the experts: tensor, context, data and pipeline index."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True)
class ExpertCoords:
    """Position of one rank for the experts: tensor, expert and data index."""

    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Grid:
    """The parallel layout of the actor and of the rollout replicas over `world_size` ranks.

    Attributes:
        world_size: Ranks in the job.
        tp: Tensor-model-parallel size of the actor.
        pp: Pipeline-model-parallel size of the actor.
        vpp: Model chunks per pipeline stage (virtual pipeline), 1 without.
        cp: Context-parallel size of the actor.
        ep: Expert-parallel size of the actor.
        etp: Tensor-parallel size of the actor's experts; None: `tp`.
        first_stage_layers: Layers of the first pipeline stage; None: as many as the others.
        last_stage_layers: Layers of the last pipeline stage; None: as many as the others.
        rollout_tp: Tensor-parallel size of a rollout replica.
        rollout_pp: Pipeline stages of a rollout replica; its ranks count tensor-parallel first, as in TensorRT-LLM.
        rollout_ep: Expert-parallel size inside a rollout replica; a divisor of `rollout_tp`.
        rollout_ranks: Ranks that sample and do not train, the last ones; 0: all ranks do both.
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
    def has_roles(self) -> bool:
        """Whether some ranks train and the others sample."""
        return self.rollout_ranks > 0

    @property
    def trainers(self) -> range:
        """Ranks that hold the actor."""
        return range(self.world_size - self.rollout_ranks)

    @property
    def samplers(self) -> range:
        """Ranks that hold the engine."""
        return range(len(self.trainers) if self.has_roles else 0, self.world_size)

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
        """Rollout replicas."""
        return len(self.samplers) // self.rollout_size

    @property
    def rollout_moe_tp(self) -> int:
        """Ranks that share each expert inside a rollout replica."""
        return self.rollout_tp // self.rollout_ep

    @property
    def fewest_ranks(self) -> int:
        """The smallest world size that the layout's own sizes allow."""
        experts = self.ep * self.expert_tp * self.pp
        actor = math.lcm(self.tp * self.cp * self.pp, experts)
        return actor + self.rollout_ranks if self.has_roles else math.lcm(actor, self.rollout_size)

    def coords(self, rank: int) -> Coords:
        """Actor coordinates of a rank that trains."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp=tp, dp=dp, pp=pp, cp=cp)

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Coordinates of a rank among the ranks of its pipeline stage that share the experts."""
        rest, etp = divmod(rank % (len(self.trainers) // self.pp), self.expert_tp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoords(etp=etp, ep=ep, edp=edp)

    def rank(self, coords: Coords) -> int:
        """Rank at the given actor coordinates."""
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    def replica(self, rank: int) -> int:
        """Rollout replica of a rank that samples."""
        return (rank - self.samplers.start) // self.rollout_size

    def rollout_rank(self, rank: int) -> int:
        """Position of a rank inside its rollout replica."""
        return (rank - self.samplers.start) % self.rollout_size

    def rollout_tp_rank(self, rank: int) -> int:
        """Position of a rank among those that share a layer inside its rollout replica."""
        return (rank - self.samplers.start) % self.rollout_tp
