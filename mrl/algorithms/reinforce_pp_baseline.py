"""REINFORCE++-baseline: the group's mean as baseline, then normalised over the global batch instead of the group.

Source: arXiv 2501.03262, section 3. The paper puts the k2 KL in the loss: `kl_in=loss kl_estimator=k2`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class ReinforcePpBaseline(PolicyGradient):
    """Advantage (x - mean(x)) / (std(x) + eps) over the batch's tokens, with x = R - mean of R in the group."""

    baseline = "mean"
    whitens = True
    unused = frozenset({"advantage_std_over"})
    kl_places = frozenset({"none", "loss", "reward"})
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "unbiased",
        "advantage_eps": 1e-8,
        "singleton_group": "error",
        "loss_aggregation": "token_mean",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }


ALGORITHM = ReinforcePpBaseline
