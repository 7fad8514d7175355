"""GPG: REINFORCE with the group's mean as baseline, corrected for uninformative groups.

Source: arXiv 2504.02546. Advantages are multiplied by N / (N - M), where M of the N samples are in groups whose rewards
are all equal; the gradient is then as large as if only the other groups had been sampled. verl's `gpg` multiplies by
the number of samples over those whose reward is not 0, which is a different number.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.algorithms.grpo import Grpo


class Gpg(Grpo):
    """Advantage (R - mean(R)) N / (N - M), mean over the group; loss -A log pi."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "advantage_std": "none",
        "loss_aggregation": "token_mean",
        "policy_loss": "gpg",
    }

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns GRPO's advantages without deviation, times the samples over those in informative groups, fp64 [N]."""
        num = self.informative_groups(outcomes).sum().clamp(min=1)
        return super().outcome_advantages(outcomes) * (outcomes.rewards_N.numel() / num)


ALGORITHM = Gpg
