"""The coefficient of the KL in the reward, which may follow the KL from step to step.

Owns the one number of an algorithm that moves in a run; commits hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config.config import AlgorithmConfig

MAX_ERROR = 0.2
"""The relative distance of the KL from its target counts as this at most."""


class KlControl:
    """Fixed, or adaptive.

    Attributes:
        coef: Of the next step.
        charged: Of the last one.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Args: config: Where it begins, and whether it moves."""
        self.coef = self.charged = config.kl_coef
        self._config = config.kl_ctrl

    @property
    def adapts(self) -> bool:
        """Whether it moves."""
        return self._config.type == "adaptive"

    def charge(self, kl_R: Tensor, mean_kl: float, num_sequences: int) -> Tensor:
        """What a step's tokens pay; then the coefficient moves.

        With e = clip(KL / target - 1, -0.2, 0.2) and n sequences it is multiplied by 1 + e n / horizon.

        Args:
            kl_R: Of each token.
            mean_kl: Of the step: mean over all ranks' sequences of their mean per trained token.
            num_sequences: So many.

        Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, with the sequences of a step for its batch, as in
        verl's `AdaptiveKLController`.
        """
        self.charged = self.coef
        if self.adapts:
            error = min(max(mean_kl / self._config.target_kl - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_sequences / self._config.horizon
        return self.charged * kl_R


def sequence_means(kl_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Sum over sequences of their mean per trained token, and the sequences that have one, fp64 [2]."""
    zeros_B = torch.zeros(num_sequences, dtype=torch.float64)
    lens_B = zeros_B.index_add(0, sequence_R, mask_R.double())
    sums_B = zeros_B.index_add(0, sequence_R, torch.where(mask_R, kl_R, 0.0).double())
    return torch.stack([(sums_B / lens_B.clamp(min=1)).sum(), (lens_B > 0).sum().double()])
