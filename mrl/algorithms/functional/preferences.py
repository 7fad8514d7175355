"""Losses of pairs of responses, of which one is better: direct preference optimisation and its relatives.

Owns the equations, of one number for each pair. Where the pairs come from and what they are summed with is
`mrl/algorithms/dpo.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """Numbers of each pair, [pairs].

    Attributes:
        chosen: log(pi / pi_ref) of the better response, summed over its trained tokens, nats.
        rejected: The same of the worse one.
        chosen_len: Trained tokens of the better one, at least 1.
        rejected_len: Of the worse one.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_len: Tensor
    rejected_len: Tensor

    @property
    def margin(self) -> Tensor:
        """Of the sums."""
        return self.chosen - self.rejected

    @property
    def margin_by_length(self) -> Tensor:
        """Of the means over tokens."""
        return self.chosen / self.chosen_len - self.rejected / self.rejected_len


def pair_losses(pairs: Pairs, loss_type: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each pair.

    Args:
        pairs: What it is of.
        loss_type: One of `LOSSES`.
        beta: How strongly the policy is held to the reference.
        label_smoothing: Of robust: part of the labels that are the wrong way round, below 0.5.
    """
    return LOSSES[loss_type](pairs, beta, label_smoothing)


def _sigmoid(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Source: Rafailov et al. 2023 (arXiv 2305.18290), equation 7."""
    return -logsigmoid(beta * pairs.margin)


def _sigmoid_norm(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Source: Lambert et al. 2024 (arXiv 2411.15124, Tulu 3), equation 6."""
    return -logsigmoid(beta * pairs.margin_by_length)


def _ipo(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Source: Azar et al. 2023 (arXiv 2310.12036), equation 17, with means over tokens as its authors have them."""
    return (pairs.margin_by_length - 1 / (2 * beta)) ** 2


def _hinge(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Source: Zhao et al. 2023 (arXiv 2305.10425, SLiC-HF), equation 2, on DPO's implicit rewards."""
    return torch.relu(1 - beta * pairs.margin)


def _robust(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    """Source: Chowdhury et al. 2024 (arXiv 2403.00409), equation 12: unbiased where labels are flipped at random."""
    right, wrong = -logsigmoid(beta * pairs.margin), -logsigmoid(-beta * pairs.margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def _apo_zero(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7."""
    return 1 - torch.sigmoid(beta * pairs.chosen) + torch.sigmoid(beta * pairs.rejected)


LOSSES: dict[str, Callable[[Pairs, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "apo_zero": _apo_zero,
}
"""By TRL's names."""
