"""SAPO: GRPO with a soft gate instead of the clip.

Source: arXiv 2511.20347.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Sapo(Grpo):
    """GRPO's advantages; loss -(4 / tau) sigmoid(tau (r - 1)) A."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "policy_loss": "sapo",
    }


ALGORITHM = Sapo
