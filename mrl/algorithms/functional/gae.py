"""Generalised advantage estimation, and the loss of a value function. Advantages are fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def gae(
    rewards_R: Tensor,
    values_R: Tensor,
    mask_R: Tensor,
    response_lens_B: Tensor,
    *,
    gamma: float,
    lam_B: Tensor,
) -> Tensor:
    """Returns the generalised advantage estimates of the trained tokens, fp64 [R], 0 elsewhere.

    The recursion runs over the trained tokens of a response only, as if the others (a tool's output) did not exist:

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    with V and A 0 after the last.

    Args:
        rewards_R: Reward of each token; those of untrained tokens are ignored.
        values_R: Value of the state before each token.
        mask_R: True where the token is trained.
        response_lens_B: Length of each sequence's response, tokens.
        gamma: Discount, [0, 1].
        lam_B: Lambda of each sequence, [0, 1].

    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 11 to 16; tokens are skipped as in verl's
    `compute_gae_advantage_return`.
    """
    advantages_R = torch.zeros_like(rewards_R, dtype=torch.float64)
    sequence_R = torch.arange(response_lens_B.numel()).repeat_interleave(response_lens_B)[mask_R]
    lens_B = torch.bincount(sequence_R, minlength=response_lens_B.numel())
    longest = int(lens_B.max()) if lens_B.numel() else 0
    if not longest:
        return advantages_R
    # right-aligned matrix of the trained tokens, one row per sequence
    column_R = torch.arange(sequence_R.numel()) - (lens_B.cumsum(0) - lens_B)[sequence_R]
    column_R = column_R + (longest - lens_B)[sequence_R]
    rewards_BT, values_BT = torch.zeros(2, lens_B.numel(), longest, dtype=torch.float64).unbind()
    rewards_BT[sequence_R, column_R] = rewards_R[mask_R].double()
    values_BT[sequence_R, column_R] = values_R[mask_R].double()
    next_BT = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], 1)
    deltas_TB = (rewards_BT + gamma * next_BT - values_BT).T.contiguous()
    decay_B = gamma * lam_B.double()
    advantage_B = torch.zeros_like(decay_B)
    for column in reversed(range(longest)):
        advantage_B = torch.addcmul(deltas_TB[column], decay_B, advantage_B)
        deltas_TB[column] = advantage_B
    advantages_R[mask_R] = deltas_TB.T[sequence_R, column_R]
    return advantages_R


def length_adaptive_lam(lens_B: Tensor, alpha: float) -> Tensor:
    """Returns lambda for each sequence length l: 1 - 1 / (alpha l), at least 0, fp64 [B].

    The longer a response, the further back its reward reaches: the sum of the powers of lambda is alpha l.

    Source: VAPO (arXiv 2504.05118), eq. 9.
    """
    return (1 - 1 / (alpha * lens_B.double().clamp(min=1))).clamp(min=0)


class ValueLoss(NamedTuple):
    """Value loss of each token, fp32; only `loss_R` carries a gradient.

    Attributes:
        loss_R: Loss, unreduced.
        clipped_R: 1 where the clipped error is the larger one, else 0.
    """

    loss_R: Tensor
    clipped_R: Tensor


def value_loss(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, *, clip: float) -> ValueLoss:
    """Returns half the squared error of each value, or of the clipped value if that is larger.

        1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    Args:
        values_R: Values by the current critic, with gradient.
        old_values_R: Values from which the advantages were computed; constants.
        returns_R: Targets; constants.
        clip: Clip range c, above 0; 0: no clipping.

    Source: verl's `compute_value_loss`; the clipping is that of openai/baselines ppo2.
    """
    values_R = values_R.float()
    plain_R = (values_R - returns_R).square()
    if clip == 0:
        return ValueLoss(0.5 * plain_R, torch.zeros_like(plain_R).detach())
    clipped_values_R = torch.maximum(torch.minimum(values_R, old_values_R + clip), old_values_R - clip)
    clipped_R = (clipped_values_R - returns_R).square()
    return ValueLoss(0.5 * torch.maximum(plain_R, clipped_R), (clipped_R > plain_R).float())
