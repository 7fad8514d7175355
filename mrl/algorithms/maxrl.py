"""MaxRL: advantages divided by the group's mean reward, so that prompts that are seldom solved weigh more.

Source: arXiv 2602.02710. The objective is between the probability of success (policy gradients) and its likelihood
(supervised learning): with n samples per prompt it is the expansion of the likelihood up to order n.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.algorithms.functional.advantages import mean_relative
from mrl.algorithms.grpo import Grpo


class Maxrl(Grpo):
    """Advantage (R - mean(R)) / mean(R) over the group; 0 where that mean is not above 0."""

    unused = frozenset({"advantage_std", "advantage_eps", "advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean"}

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the advantages relative to the group's mean, fp64 [N]."""
        return mean_relative(outcomes.rewards_N, outcomes.group_id_N, singleton=self.singleton)


ALGORITHM = Maxrl
