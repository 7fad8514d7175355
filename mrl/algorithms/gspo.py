"""GSPO: GRPO with a sequence-level ratio, the geometric mean of the tokens' ratios.

Source: arXiv 2507.18071. A sequence's ratio stays far closer to 1 than a token's, hence the paper's narrow clip. Made
for MoE models: single tokens that are routed to other experts change it little.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Gspo(Grpo):
    """GRPO's advantages; loss: the clipped surrogate of exp(mean of log(pi / pi_old))."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "policy_loss": "gspo",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
    }


ALGORITHM = Gspo
