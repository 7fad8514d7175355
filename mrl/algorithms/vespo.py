"""VESPO: the policy gradient weighted by a smooth function of the sequence's importance weight.

Source: arXiv 2602.10693; averaged over tokens as in TRL.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Vespo(Grpo):
    """GRPO's advantages; loss -sg(w^k exp(lambda (1 - w))) A log pi."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {
        "loss_aggregation": "token_mean",
        "policy_loss": "vespo",
    }


ALGORITHM = Vespo
