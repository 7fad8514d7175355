"""Dr.GRPO: GRPO without the division by sigma and by the response's length, which bias it.

Source: arXiv 2503.20783, section 3.2. The constant divisor is `algorithm.loss_norm_length`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class DrGrpo(PolicyGradient):
    """Advantage R - mean(R) over the group."""

    baseline = "mean"
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "none",
        "advantage_eps": 1e-6,
        "singleton_group": "error",
        "loss_aggregation": "seq_mean_token_sum_norm",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }


ALGORITHM = DrGrpo
