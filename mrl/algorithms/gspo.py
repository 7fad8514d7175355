"""GSPO: GRPO whose ratio is a whole sequence's, the geometric mean of its tokens'.

Source: arXiv 2507.18071. A sequence's ratio stays far closer to 1 than a token's, hence the narrow clip of the paper.
Made for mixtures of experts, where single tokens that go to other experts move it little.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Gspo(Grpo):
    """GRPO's advantages; the clipped surrogate of exp(mean of log(pi / pi_old))."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "policy_loss": "gspo",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
    }


ALGORITHM = Gspo
