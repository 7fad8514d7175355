"""Pass@k: only the best response of a group is trained, by its distance to the second best.

Source: arXiv 2503.19595: the mean of these advantages is an unbiased estimate of the gradient of the group's highest
reward. With rewards of 0 and 1 only groups with exactly one right response are trained. verl's `grpo_passk`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mrl.algorithms.base import Outcomes, required
from mrl.algorithms.functional.advantages import best_of_group
from mrl.algorithms.grpo import Grpo


class GrpoPassk(Grpo):
    """Advantage (R_1 - R_2) / (std(R) + eps) of the group's best sample, with the two highest rewards; 0 for others."""

    unused = frozenset({"advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean"}

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the advantages of the best samples, fp64 [N]."""
        return best_of_group(
            outcomes.rewards_N,
            outcomes.group_id_N,
            std=required(self.config.advantage_std, "algorithm.advantage_std"),
            eps=self.config.advantage_eps or 0.0,
            singleton=self.singleton,
        )


ALGORITHM = GrpoPassk
