"""GMPO: GRPO with the geometric mean of a sequence's clipped ratios in place of the arithmetic one.

Source: arXiv 2507.20673, with its clip of exp(-0.4) to exp(0.4).
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Gmpo(Grpo):
    """GRPO's advantages; loss -A times the geometric mean of the clipped ratios."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "policy_loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
    }


ALGORITHM = Gmpo
