"""Losses of pairs of responses, one of which is preferred: DPO and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """Statistics of each pair of responses, [pairs].

    Attributes:
        chosen: log(pi / pi_ref) of the preferred response, summed over its trained tokens, nats.
        rejected: log(pi / pi_ref) of the other response, summed over its trained tokens, nats.
        chosen_len: Trained tokens of the preferred response, at least 1.
        rejected_len: Trained tokens of the other response, at least 1.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_len: Tensor
    rejected_len: Tensor

    @property
    def margin(self) -> Tensor:
        """Difference of the summed log-ratios, nats."""
        return self.chosen - self.rejected

    @property
    def margin_by_length(self) -> Tensor:
        """Difference of the log-ratios' means over tokens, nats."""
        return self.chosen / self.chosen_len - self.rejected / self.rejected_len


def pair_losses(pairs: Pairs, loss_type: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each pair, [pairs].

    Args:
        pairs: Log-ratios and lengths.
        loss_type: Name of the loss, a key of `LOSSES`.
        beta: Strength of the constraint to the reference.
        label_smoothing: Fraction of flipped labels, below 0.5; read by "robust" only.
    """
    return LOSSES[loss_type](pairs, beta, label_smoothing)


def _sigmoid(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Returns the loss of Rafailov et al. 2023 (arXiv 2305.18290), equation 7."""
    return -logsigmoid(beta * pairs.margin)


def _sigmoid_norm(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Returns the loss of Lambert et al. 2024 (arXiv 2411.15124, Tulu 3), equation 6."""
    return -logsigmoid(beta * pairs.margin_by_length)


def _ipo(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Returns the loss of Azar et al. 2023 (arXiv 2310.12036), equation 17, with the authors' means over tokens."""
    return (pairs.margin_by_length - 1 / (2 * beta)) ** 2


def _hinge(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Returns the loss of Zhao et al. 2023 (arXiv 2305.10425, SLiC-HF), equation 2, on DPO's implicit rewards."""
    return torch.relu(1 - beta * pairs.margin)


def _robust(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    """Returns the loss of Chowdhury et al. 2024 (arXiv 2403.00409), equation 12: unbiased under random label flips."""
    right, wrong = -logsigmoid(beta * pairs.margin), -logsigmoid(-beta * pairs.margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def _apo_zero(pairs: Pairs, beta: float, _: float) -> Tensor:
    """Returns the loss of D'Oosterlinck et al. 2024 (arXiv 2408.06266), equation 7."""
    return 1 - torch.sigmoid(beta * pairs.chosen) + torch.sigmoid(beta * pairs.rejected)


LOSSES: dict[str, Callable[[Pairs, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "apo_zero": _apo_zero,
}
"""Losses by TRL's names."""
