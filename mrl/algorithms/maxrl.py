"""MaxRL: advantages over the group's mean reward, so that seldom solved prompts weigh more.

Source: arXiv 2602.02710. Between the probability of success, which policy gradients maximise, and its likelihood, which
supervised learning does: with n samples of a prompt it is the latter's expansion up to order n.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.algorithms.functional.advantages import mean_relative
from mrl.algorithms.grpo import Grpo


class Maxrl(Grpo):
    """(R - mean of the group) / mean of the group, 0 where that is not above 0."""

    unused = frozenset({"advantage_std", "advantage_eps", "advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean"}

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Relative to the mean, fp64 [N]."""
        return mean_relative(outcomes.rewards_N, outcomes.group_id_N, singleton=self.singleton)


ALGORITHM = Maxrl
