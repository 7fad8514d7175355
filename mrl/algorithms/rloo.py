"""RLOO: REINFORCE with the mean reward of the prompt's other samples as baseline.

Source: arXiv 2402.14740, eq. 8. A response's log-probability is the sum of its tokens', hence the aggregation. With one
optimizer step per batch the ratio is 1 and the clip never binds.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class Rloo(PolicyGradient):
    """Advantage R - mean of R over the other samples of the group."""

    baseline = "leave_one_out"
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "none",
        "advantage_eps": 1e-6,
        "singleton_group": "error",
        "loss_aggregation": "seq_mean_token_sum",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }


ALGORITHM = Rloo
