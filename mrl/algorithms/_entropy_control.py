"""The coefficient of the entropy bonus, fixed or adapted after each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.config import AlgorithmConfig
from mrl.errors import UserError

ENTROPY = "actor/entropy"
"""Metric that the adaptive coefficient follows."""


class EntropyControl:
    """Fixed or adaptive entropy coefficient; checkpoints store its two numbers.

    Attributes:
        coef: Coefficient that applies while the entropy is at or below its target.
        last: Mean entropy of the last minibatch, nats; None before the first.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.entropy_coef
        self.last: float | None = None
        self._config = config.entropy_ctrl

    @property
    def is_adaptive(self) -> bool:
        """True if the coefficient is adaptive."""
        return self._config.type == "adaptive"

    @property
    def effective_coef(self) -> float:
        """Coefficient of the next optimizer step; if adaptive, 0 unless the last entropy is at or below the target."""
        low = self.last is not None and self.last <= self._config.target_entropy
        return self.coef if low or not self.is_adaptive else 0.0

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapts the coefficient after an optimizer step.

        It rises by `delta` if the entropy is at or below its target and falls by `delta` otherwise, clamped to
        `min_coef` .. `max_coef`.

        Args:
            metrics: Metrics of the step. An adaptive coefficient reads "actor/entropy", the mean over the trained
                tokens of the global minibatch, nats.

        Returns:
            {"actor/entropy_coef": coefficient of this step}, or {} if it is fixed.

        Raises:
            UserError: The coefficient is adaptive and the algorithm's loss does not report the entropy.

        Source: Skywork-OR1, arXiv 2505.22312; TRL's `use_adaptive_entropy`.
        """
        if not self.is_adaptive:
            return {}
        if ENTROPY not in metrics:
            raise UserError(
                f"algorithm.entropy_ctrl.type=adaptive follows {ENTROPY}, which the algorithm's loss does not report. "
                f"Return it among the metrics of `loss`, or set algorithm.entropy_ctrl.type=fixed."
            )
        applied, entropy = self.effective_coef, metrics[ENTROPY]
        step = self._config.delta if entropy <= self._config.target_entropy else -self._config.delta
        self.coef = min(max(self.coef + step, self._config.min_coef), self._config.max_coef)
        self.last = entropy
        return {"actor/entropy_coef": applied}
