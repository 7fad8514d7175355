"""Per-token policy losses.

Owns the clipped surrogate. It does not reduce: `aggregation` makes the weights that turn per-token losses into one
number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrl.functional.importance import log_ratio


class Surrogate(NamedTuple):
    """What the clipped surrogate gives for each token; all fp32, only `loss_R` carries a gradient.

    Attributes:
        loss_R: Loss, unreduced.
        log_ratio_R: log(pi / pi_old), clamped to +-20.
        ratio_R: Its exponential.
        clipped_R: 1 where the clipped branch is the larger loss (no gradient flows), else 0.
        clipped_lower_R: 1 where the dual clip binds, else 0.
    """

    loss_R: Tensor
    log_ratio_R: Tensor
    ratio_R: Tensor
    clipped_R: Tensor
    clipped_lower_R: Tensor


def clipped_surrogate(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """PPO's clipped surrogate, per token: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    With `dual_clip` = c the loss of a token with A < 0 is at most -c A, so that a token whose ratio exploded does not
    dominate the step.

    Args:
        logprobs_R: Current policy, nats, fp32, requires grad.
        old_logprobs_R: Same tokens under the policy that the ratio is taken against, nats; a constant.
        advantages_R: fp32, a constant.
        clip_low: The ratio is kept >= 1 - clip_low; in (0, 1).
        clip_high: The ratio is kept <= 1 + clip_high; above 0.
        dual_clip: c, above 1; 0: off.

    Raises:
        ValueError: The shapes differ.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; asymmetric bounds: DAPO (arXiv 2503.14476), eq. 10;
    dual clip: Ye et al. 2019 (arXiv 1912.09729), eq. 5.
    """
    if advantages_R.shape != logprobs_R.shape:
        raise ValueError(
            f"advantages have shape {tuple(advantages_R.shape)}, log-probabilities {tuple(logprobs_R.shape)}: "
            "both must have one entry for each response token."
        )
    advantages_R = advantages_R.float()
    log_ratio_R = log_ratio(logprobs_R, old_logprobs_R)
    ratio_R = log_ratio_R.exp()
    plain_R = -advantages_R * ratio_R
    bounded_R = -advantages_R * ratio_R.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = torch.maximum(plain_R, bounded_R)
    clipped_R = (bounded_R > plain_R).float()
    clipped_lower_R = torch.zeros_like(clipped_R)
    if dual_clip > 0:
        bound_R = -advantages_R * dual_clip
        binds_R = (advantages_R < 0) & (loss_R > bound_R)
        loss_R = torch.where(binds_R, bound_R, loss_R)
        clipped_lower_R = binds_R.float()
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), clipped_R, clipped_lower_R)
