"""DPPO: a trust region by divergence instead of the clipped ratio; `policy_loss=dppo_kl` is its KL form.

Source: arXiv 2602.04879. The bounds are those of verl's example: 0.15 of the total variation, 0.05 of the KL.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Dppo(Grpo):
    """GRPO's advantages; loss -sg(min(r, cap)) A log pi where the token's probability is within the trust region."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "policy_loss": "dppo_tv",
        "clip_low": 0.15,
        "clip_high": 0.15,
    }


ALGORITHM = Dppo
