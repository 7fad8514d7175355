"""Clip-Cov: GRPO that keeps the entropy up by dropping some of the tokens that take it down most.

Source: arXiv 2505.22617; averaged over tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class ClipCov(Grpo):
    """GRPO's advantages; PPO's clipped surrogate without tokens drawn from those that covary with them."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean", "policy_loss": "clip_cov"}


ALGORITHM = ClipCov
