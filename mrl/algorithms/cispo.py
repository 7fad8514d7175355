"""CISPO: GRPO's advantages, with the clipped ratio as weight of the policy gradient, so every token keeps its gradient.

Source: MiniMax-M1, arXiv 2506.13585: averaged over tokens, no lower bound. The upper bound is 5, as in TRL.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Cispo(Grpo):
    """GRPO's advantages; loss -sg(clip(r)) A log pi."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "loss_aggregation": "token_mean",
        "policy_loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
    }


ALGORITHM = Cispo
