"""GRPO: group-relative advantages; every response has the same weight.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1. Trainers differ in sigma and epsilon: unbiased and 1e-6 here and in
verl, 1e-4 in TRL, population and 1e-4 in Megatron-LM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class Grpo(PolicyGradient):
    """Advantage (R - mean(R)) / (std(R) + eps) over the group."""

    baseline = "mean"
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "unbiased",
        "advantage_eps": 1e-6,
        "singleton_group": "error",
        "loss_aggregation": "seq_mean_token_mean",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }


ALGORITHM = Grpo
