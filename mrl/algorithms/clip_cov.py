"""Clip-Cov: GRPO that preserves entropy by dropping some of the tokens that reduce it most.

Source: arXiv 2505.22617; averaged over tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class ClipCov(Grpo):
    """GRPO's advantages; loss: PPO's clipped surrogate, 0 at tokens drawn from those with a high covariance."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean", "policy_loss": "clip_cov"}


ALGORITHM = ClipCov
