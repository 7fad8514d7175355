"""REINFORCE++: no group baseline; reward-to-go (per token with KL in the reward), normalised over the global batch.

Source: arXiv 2501.03262, section 3. The paper puts the k1 KL in the reward: `kl_in=reward kl_estimator=k1`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms._policy_gradient import PolicyGradient


class ReinforcePp(PolicyGradient):
    """Advantage (G - mean(G)) / (std(G) + eps) over the batch's tokens, with G = the reward-to-go."""

    baseline = "none"
    whitens = True
    kl_places = frozenset({"none", "loss", "reward"})
    unused = frozenset({"singleton_group", "advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = {
        "advantage_std": "unbiased",
        "advantage_eps": 1e-8,
        "loss_aggregation": "token_mean",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }


ALGORITHM = ReinforcePp
