"""The learning rate of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """Learning-rate schedule: linear warm-up from 0, then constant, or decaying to `minimum` at the last step.

    "wsd" is constant up to the last `decay_steps` steps and linear in them (Hu et al. 2024, MiniCPM, section 4).

    Attributes:
        peak: Learning rate after warm-up.
        minimum: Final learning rate of linear, cosine and wsd.
        shape: Curve after warm-up.
        warmup_steps: Optimizer steps of the warm-up.
        num_steps: Total optimizer steps.
        decay_steps: Optimizer steps of the decay of wsd, at least 1.
    """

    peak: float
    minimum: float
    shape: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: int
    num_steps: int
    decay_steps: int = 1

    def at(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "wsd":
            left = max(0, self.num_steps - 1 - step)
            return self.minimum + (self.peak - self.minimum) * min(1.0, left / self.decay_steps)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - 1 - self.warmup_steps))
        factor = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * factor
