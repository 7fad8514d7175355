"""DAPO: clip-higher, token-level loss, dynamic sampling; the overlong penalty is `algorithm.overlong.penalty`.

Source: arXiv 2503.14476, eq. 8 and section 3. The overlong buffer depends on the response length, so it has no default.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class Dapo(PolicyGradient):
    """Advantage (R - mean(R)) / (std(R) + eps) over the group; every token of the batch has the same weight."""

    baseline = "mean"
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "unbiased",
        "advantage_eps": 1e-6,
        "singleton_group": "error",
        "loss_aggregation": "token_mean",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 0.0,
        "dynamic_sampling": True,
    }


ALGORITHM = Dapo
