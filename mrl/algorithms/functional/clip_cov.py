"""Policy losses that treat the tokens apart whose log-probability covaries most with the advantage: Clip-Cov, KL-Cov.

Such tokens take the entropy down. Which they are depends on the whole minibatch: `clip_cov_choice` and `kl_cov_choice`
say so before the update, from the log-probabilities of the present weights, the same for every split and order; the
losses are then those of `losses`.

Source: arXiv 2505.22617. verl chooses within each microbatch and each rank, so that its sum depends on the split, and
draws Clip-Cov's tokens with a generator that depends on their order; where it sees the whole minibatch at once the
choice is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms.functional.distributed_topk import largest
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.losses import Surrogate, clipped_surrogate, token_log_ratio

ROUNDING = 1e-5
"""Nats by which two scores of a token at the same weights differ at most: |log r| has no gradient there."""

Reduce = Callable[[Tensor], Tensor]
"""Collective over data-parallel: elementwise sum."""


def covariances(logprobs_R: Tensor, advantages_R: Tensor, mask_R: Tensor, reduce: Reduce) -> tuple[Tensor, int]:
    """Collective over data-parallel: (A - mean(A)) (log pi - mean(log pi)) of each trained token, fp64, 0 elsewhere.

    Args:
        logprobs_R: Current policy, nats.
        advantages_R: Of each token.
        mask_R: True where the token is trained.
        reduce: Elementwise sum over the data-parallel ranks; called once.

    Returns:
        The covariances, and the number of trained tokens; both means are over all of them.
    """
    advantages_R, logprobs_R = (torch.where(mask_R, each_R.double(), 0.0) for each_R in (advantages_R, logprobs_R))
    sums = reduce(torch.stack([mask_R.sum().double(), advantages_R.sum(), logprobs_R.sum()]))
    num = sums[0].clamp(min=1.0)
    covariances_R = (advantages_R - sums[1] / num) * (logprobs_R - sums[2] / num)
    return torch.where(mask_R, covariances_R, 0.0), int(sums[0])


def clip_cov_choice(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    mask_R: Tensor,
    uniforms_R: Tensor,
    reduce: Reduce,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    """Collective over data-parallel: the tokens that Clip-Cov drops, bool [R].

    `clip_cov_ratio` of all trained tokens, at least one, drawn from those whose covariance is between the bounds and
    that the clip leaves alone.

    Args:
        logprobs_R: Current policy, nats.
        old_logprobs_R: Denominator of the ratio.
        advantages_R: Of each token.
        mask_R: True where the token is trained.
        uniforms_R: The draw: a number of each token's own, in [0, 1).
        reduce: Elementwise sum over the data-parallel ranks.
        clip_low: As in `clip_cov`.
        clip_high: As in `clip_cov`.
        clip_cov_ratio: Part of the trained tokens.
        clip_cov_lb: Covariances at or below this are left alone.
        clip_cov_ub: Covariances at or above this are left alone.
    """
    covariances_R, num = covariances(logprobs_R, advantages_R, mask_R, reduce)
    surrogate = clipped_surrogate(logprobs_R, old_logprobs_R, advantages_R, clip_low=clip_low, clip_high=clip_high)
    between_R = (covariances_R > clip_cov_lb) & (covariances_R < clip_cov_ub)
    eligible_R = mask_R & between_R & (surrogate.clipped_R == 0)
    return largest(torch.zeros_like(covariances_R), eligible_R, max(int(clip_cov_ratio * num), 1), uniforms_R, reduce)


def clip_cov(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    chosen_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Clip-Cov: PPO's clipped surrogate, 0 at tokens drawn from those whose covariance with A is within bounds.

    The covariance of a token is (A - mean(A)) (log pi - mean(log pi)) over the minibatch; `clip_cov_ratio` of all
    tokens are drawn where it is between `clip_cov_lb` and `clip_cov_ub`.

    Source: arXiv 2505.22617. verl's `clip_cov` draws within each microbatch, so that its sum depends on the split.
    """
    surrogate = clipped_surrogate(logprobs_R, old_logprobs_R, advantages_R, clip_low=clip_low, clip_high=clip_high)
    loss_R = torch.where(chosen_R, 0.0, surrogate.loss_R)
    return surrogate._replace(loss_R=loss_R, clipped_R=chosen_R.to(loss_R.dtype), clipped_lower_R=surrogate.clipped_R)


def kl_cov_choice(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    mask_R: Tensor,
    uniforms_R: Tensor,
    reduce: Reduce,
    *,
    kl_cov_ratio: float,
) -> Tensor:
    """Collective over data-parallel: the tokens with the largest covariances, bool [R]; arguments as above.

    `kl_cov_ratio` of all trained tokens, at least one; `old_logprobs_R` plays no part.
    """
    covariances_R, num = covariances(logprobs_R, advantages_R, mask_R, reduce)
    return largest(covariances_R, mask_R, max(int(kl_cov_ratio * num), 1), uniforms_R, reduce)


def kl_cov(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, chosen_R: Tensor, *, ppo_kl_coef: float
) -> Surrogate:
    """KL-Cov: -r A, and + ppo_kl_coef |log r| at the `kl_cov_ratio` of all tokens whose covariance with A is largest.

    The covariance of a token is (A - mean(A)) (log pi - mean(log pi)) over the minibatch. There is no clip.

    Source: arXiv 2505.22617. verl's `kl_cov` takes the largest of each microbatch, so its sum depends on the split.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    ratio_R = log_ratio_R.exp()
    loss_R = -at_least_fp32(advantages_R) * ratio_R
    held_R = chosen_R & (log_ratio_R.detach().abs() > ROUNDING)
    loss_R = torch.where(held_R, loss_R + ppo_kl_coef * log_ratio_R.abs(), loss_R)
    none_R = torch.zeros_like(ratio_R.detach())
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), chosen_R.to(none_R.dtype), none_R)
