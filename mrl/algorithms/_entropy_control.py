"""The coefficient of the entropy bonus, which may follow the entropy from one optimizer step to the next.

Owns that number and the entropy that it was moved by; commits hold both.
"""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.config import AlgorithmConfig
from mrl.errors import UserError

ENTROPY = "actor/entropy"


class EntropyControl:
    """Fixed, or adaptive.

    Attributes:
        coef: Of the bonus while the entropy is at its target or below.
        last: Mean entropy of the last minibatch, nats; None before the first.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Args: config: Where it begins, and whether it moves."""
        self.coef = config.entropy_coef
        self.last: float | None = None
        self._config = config.entropy_ctrl

    @property
    def adapts(self) -> bool:
        """Whether it moves."""
        return self._config.type == "adaptive"

    @property
    def applied(self) -> float:
        """Factor of the bonus in the next optimizer step; adaptive: 0 until an entropy at most its target came."""
        low = self.last is not None and self.last <= self._config.target_entropy
        return self.coef if low or not self.adapts else 0.0

    def follow(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """After an optimizer step: up by `delta` while the entropy is at most its target, else down, within bounds.

        Args:
            metrics: Metrics of the step. An adaptive coefficient reads "actor/entropy": mean over the trained tokens of
                the global minibatch, nats.

        Returns:
            actor/entropy_coef, the factor that the step had; {} where it is fixed.

        Raises:
            UserError: The coefficient is adaptive, and the algorithm's loss does not report the entropy.

        Source: Skywork-OR1, arXiv 2505.22312; TRL's `use_adaptive_entropy`.
        """
        if not self.adapts:
            return {}
        if ENTROPY not in metrics:
            raise UserError(
                f"algorithm.entropy_ctrl.type=adaptive follows {ENTROPY}, which the algorithm's loss does not report. "
                f"Return it among the metrics of `loss`, or set algorithm.entropy_ctrl.type=fixed."
            )
        had, entropy = self.applied, metrics[ENTROPY]
        step = self._config.delta if entropy <= self._config.target_entropy else -self._config.delta
        self.coef = min(max(self.coef + step, self._config.min_coef), self._config.max_coef)
        self.last = entropy
        return {"actor/entropy_coef": had}
