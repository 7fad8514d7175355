"""The learning rate of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """Learning-rate schedule: linear warm-up from 0, then constant, or decaying to `minimum` at the last step.

    Attributes:
        peak: Learning rate after warm-up.
        minimum: Final learning rate of linear and cosine.
        shape: Curve after warm-up.
        warmup_steps: Optimizer steps of the warm-up.
        num_steps: Total optimizer steps.
    """

    peak: float
    minimum: float
    shape: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - 1 - self.warmup_steps))
        factor = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * factor
