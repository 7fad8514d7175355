"""KL-Cov: GRPO that preserves entropy by a penalty on the tokens that reduce it most.

Source: arXiv 2505.22617; averaged over tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class KlCov(Grpo):
    """GRPO's advantages; loss -r A, with a penalty at the tokens with the highest covariance."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean", "policy_loss": "kl_cov"}


ALGORITHM = KlCov
