"""Clip-Cov and KL-Cov: policy losses with a separate rule for tokens of high covariance of log pi and advantage.

Such tokens reduce the entropy most. They are selected from the full minibatch before the update (`clip_cov_choice`,
`kl_cov_choice`), with log-probabilities of the current weights, so that the selection does not depend on the split or
order.

Source: arXiv 2505.22617. verl selects within each microbatch and rank, so its result depends on the split, and draws
Clip-Cov's tokens with a generator that depends on their order; with the full minibatch in one microbatch the selection
is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms.functional.distributed_topk import top_k_mask
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.losses import Surrogate, clipped_surrogate, token_log_ratio

ROUNDING = 1e-5
"""Largest difference, in nats, of two scores of a token at the same weights; |log r| gets no gradient below it."""

Reduce = Callable[[Tensor], Tensor]
"""Collective over data-parallel: elementwise sum."""


def covariances(logprobs_R: Tensor, advantages_R: Tensor, mask_R: Tensor, reduce: Reduce) -> tuple[Tensor, int]:
    """Collective over data-parallel: returns (A - mean(A)) (log pi - mean(log pi)) per trained token, 0 elsewhere.

    Args:
        logprobs_R: Log-probabilities of the current policy, nats.
        advantages_R: Advantage of each token.
        mask_R: True where the token is trained.
        reduce: Elementwise sum over the data-parallel ranks; called once.

    Returns:
        The covariances, fp64 [R], and the number of trained tokens; both means are over all ranks' trained tokens.
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
    """Collective over data-parallel: selects the tokens that Clip-Cov drops, bool [R].

    A fraction `clip_cov_ratio` of all trained tokens, at least one, is drawn from those whose covariance is between the
    bounds and whose ratio is not clipped.

    Args:
        logprobs_R: Log-probabilities of the current policy, nats.
        old_logprobs_R: Log-probabilities in the ratio's denominator, nats.
        advantages_R: Advantage of each token.
        mask_R: True where the token is trained.
        uniforms_R: One random number per token, in [0, 1), that decides the draw.
        reduce: Elementwise sum over the data-parallel ranks.
        clip_low: Lower clip bound, see `clip_cov`.
        clip_high: Upper clip bound, see `clip_cov`.
        clip_cov_ratio: Fraction of the trained tokens to drop.
        clip_cov_lb: Lower bound; tokens with a covariance at or below it are not dropped.
        clip_cov_ub: Upper bound; tokens with a covariance at or above it are not dropped.
    """
    covariances_R, num = covariances(logprobs_R, advantages_R, mask_R, reduce)
    surrogate = clipped_surrogate(logprobs_R, old_logprobs_R, advantages_R, clip_low=clip_low, clip_high=clip_high)
    between_R = (covariances_R > clip_cov_lb) & (covariances_R < clip_cov_ub)
    eligible_R = mask_R & between_R & (surrogate.clipped_R == 0)
    return top_k_mask(
        torch.zeros_like(covariances_R), eligible_R, max(int(clip_cov_ratio * num), 1), uniforms_R, reduce
    )


def clip_cov(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    chosen_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Returns Clip-Cov's loss: PPO's clipped surrogate, 0 at the tokens of `clip_cov_choice`.

    The covariance of a token is (A - mean(A)) (log pi - mean(log pi)) over the minibatch; `clip_cov_ratio` of all
    tokens are drawn where it is between `clip_cov_lb` and `clip_cov_ub`.

    Source: arXiv 2505.22617. verl's `clip_cov` draws within each microbatch, so its result depends on the split.
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
    """Collective over data-parallel: selects the tokens with the largest covariances, bool [R].

    The number of tokens is the fraction `kl_cov_ratio` of all trained tokens, at least one. The arguments are those of
    `clip_cov_choice`; `old_logprobs_R` is not used.
    """
    covariances_R, num = covariances(logprobs_R, advantages_R, mask_R, reduce)
    return top_k_mask(covariances_R, mask_R, max(int(kl_cov_ratio * num), 1), uniforms_R, reduce)


def kl_cov(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, chosen_R: Tensor, *, ppo_kl_coef: float
) -> Surrogate:
    """Returns KL-Cov's loss: -r A, plus ppo_kl_coef |log r| at the tokens of `kl_cov_choice`. There is no clip.

    The covariance of a token is (A - mean(A)) (log pi - mean(log pi)) over the minibatch.

    Source: arXiv 2505.22617. verl's `kl_cov` takes the largest of each microbatch, so its result depends on the split.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    ratio_R = log_ratio_R.exp()
    loss_R = -at_least_fp32(advantages_R) * ratio_R
    penalised_R = chosen_R & (log_ratio_R.detach().abs() > ROUNDING)
    loss_R = torch.where(penalised_R, loss_R + ppo_kl_coef * log_ratio_R.abs(), loss_R)
    zeros_R = torch.zeros_like(ratio_R.detach())
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), chosen_R.to(zeros_R.dtype), zeros_R)
