"""DRO: GRPO with a squared log-ratio as penalty for leaving the sampling policy.

Source: arXiv 2405.19107, with the group's mean in place of a learned value of the prompt; averaged over tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.grpo import Grpo


class Dro(Grpo):
    """GRPO's advantages; loss -A log pi + (beta / 2) (log r)^2."""

    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean", "policy_loss": "dro"}


ALGORITHM = Dro
