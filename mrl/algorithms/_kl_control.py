"""The coefficient of the KL in the reward, fixed or adapted after each step."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config.config import AlgorithmConfig

MAX_ERROR = 0.2
"""Bound of the relative distance between the KL and its target."""


class KlControl:
    """Fixed or adaptive KL coefficient; checkpoints store `coef`.

    Attributes:
        coef: Coefficient of the next step.
        charged: Coefficient of the last step.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = self.charged = config.kl_coef
        self._config = config.kl_ctrl

    @property
    def is_adaptive(self) -> bool:
        """True if the coefficient is adaptive."""
        return self._config.type == "adaptive"

    def charge(self, kl_R: Tensor, mean_kl: float, num_sequences: int) -> Tensor:
        """Returns the KL penalty of each token, coefficient times KL; then adapts the coefficient.

        With e = clip(KL / target - 1, -0.2, 0.2) and n sequences, the coefficient is multiplied by 1 + e n / horizon.

        Args:
            kl_R: KL of each token, nats.
            mean_kl: KL of the step, nats: mean over the sequences of all ranks of their mean per trained token.
            num_sequences: Sequences of the step, n.

        Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, with the sequences of a step for its batch, as in
        verl's `AdaptiveKLController`.
        """
        self.charged = self.coef
        if self.is_adaptive:
            error = min(max(mean_kl / self._config.target_kl - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_sequences / self._config.horizon
        return self.charged * kl_R


def sequence_means(kl_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Returns the sum of the sequences' mean KL per trained token and the number of sequences with one, fp64 [2]."""
    zeros_B = torch.zeros(num_sequences, dtype=torch.float64)
    lens_B = zeros_B.index_add(0, sequence_R, mask_R.double())
    sums_B = zeros_B.index_add(0, sequence_R, torch.where(mask_R, kl_R, 0.0).double())
    return torch.stack([(sums_B / lens_B.clamp(min=1)).sum(), (lens_B > 0).sum().double()])
