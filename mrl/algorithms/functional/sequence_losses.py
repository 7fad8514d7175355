"""Policy losses with a sequence-level ratio: GSPO, LUSPO, GMPO, VESPO.

Each returns one loss per token, which `aggregation` weighs like those of `losses`; the arguments are the same, and
`sequences` maps tokens to sequences. A microbatch must have complete sequences. In the equations n is the number of
trained tokens of a sequence and d_t is log(pi / pi_old) of token t, clamped to +-20.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import MAX_LOG_RATIO, at_least_fp32
from mrl.algorithms.functional.losses import Surrogate, bounded_surrogate, token_log_ratio

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper clamp of GSPO's log-ratio (as in verl): one broken sequence cannot give inf."""

MIN_LOG_WEIGHT = math.log(1e-8)
"""Lower clamp of VESPO's log weight, log 1e-8 (as in TRL and the paper's code)."""


class Sequences(NamedTuple):
    """Mapping of response tokens to sequences.

    Attributes:
        mask_R: True where the token is trained.
        sequence_R: Index of each token's sequence, int64.
        num: Number of sequences.
    """

    mask_R: Tensor
    sequence_R: Tensor
    num: int

    @property
    def lens_B(self) -> Tensor:
        """Trained tokens of each sequence, int64."""
        zeros_B = self.sequence_R.new_zeros(self.num)
        return zeros_B.index_add_(0, self.sequence_R, self.mask_R.to(zeros_B.dtype))

    def sums_B(self, values_R: Tensor) -> Tensor:
        """Returns the sum over each sequence's trained tokens."""
        trained_R = torch.where(self.mask_R, values_R, 0.0)
        return trained_R.new_zeros(self.num).index_add(0, self.sequence_R, trained_R)

    def means_B(self, values_R: Tensor) -> Tensor:
        """Returns the mean over each sequence's trained tokens; 0 if there are none."""
        return self.sums_B(values_R) / self.lens_B.clamp(min=1)

    def largest_B(self, values_R: Tensor) -> Tensor:
        """Returns the largest value of each sequence's trained tokens; 0 if there are none."""
        trained_R = torch.where(self.mask_R, values_R, -torch.inf)
        lowest_B = trained_R.new_full((self.num,), -torch.inf)
        return torch.where(self.lens_B > 0, lowest_B.scatter_reduce(0, self.sequence_R, trained_R, "amax"), 0.0)

    def sum_R(self, values_R: Tensor) -> Tensor:
        """Returns, at each token, the sum over the trained tokens of its sequence."""
        return self.sums_B(values_R)[self.sequence_R]

    def mean_R(self, values_R: Tensor) -> Tensor:
        """Returns, at each token, the mean over the trained tokens of its sequence; 0 if none is trained."""
        return self.sum_R(values_R) / self.sum_R(torch.ones_like(values_R)).clamp(min=1.0)


def gspo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Returns GSPO's loss in the token form: the clipped surrogate of s_t = sg(s) pi / sg(pi).

    s = exp(mean of d over the sequence). s_t has the value of the sequence's ratio s and the gradient of its own token,
    so that A may vary over a sequence. If A is constant and the aggregation is seq_mean_token_mean, gradient and value
    are those of the sequence form -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    Source: arXiv 2507.18071. verl has the token form too and averages over tokens unless `loss_agg_mode` says
    otherwise; TRL has the sequence form (`importance_sampling_level=sequence`).
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    own_R = at_least_fp32(logprobs_R)
    mean_R = sequences.mean_R(log_ratio_R.detach()).clamp(max=MAX_LOG_SEQUENCE_RATIO)
    ratio_R = (own_R - own_R.detach() + mean_R).exp()
    return bounded_surrogate(
        log_ratio_R, ratio_R, advantages_R, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def luspo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Returns LUSPO's loss: that of `gspo`; the aggregation seq_mean_token_sum weighs sequences by their length.

    Source: arXiv 2602.05261. TRL's `luspo` has the sequence form; verl has none.
    """
    return gspo(
        logprobs_R,
        old_logprobs_R,
        advantages_R,
        sequences,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def gmpo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Returns GMPO's loss: -A exp(mean of u over the sequence), the geometric mean of clipped ratios.

    u_t = d_t where A_t < 0 and d_t > -clip_low or A_t > 0 and d_t < clip_high, else the bound: a token is clipped
    before the mean, in log space, on the side to which A drives it. A is its mean over the sequence. Each token has the
    loss of its sequence, so that seq_mean_token_mean is the mean over sequences.

    Source: arXiv 2507.20673. verl (`geo_mean`) has the same but averages the sequences of each microbatch separately,
    which makes its result depend on the split; with token-level importance weights it takes their geometric mean.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    advantages_R = at_least_fp32(advantages_R)
    bounded_R = log_ratio_R.clamp(-clip_low, clip_high)
    sign_R = advantages_R.sign()
    kept_R = sign_R * torch.minimum(sign_R * log_ratio_R, sign_R * bounded_R)
    ratio_R = sequences.mean_R(kept_R).exp()
    loss_R = -sequences.mean_R(advantages_R) * ratio_R
    outside_R = bounded_R != log_ratio_R
    clipped_R, lower_R = ((outside_R & side_R).to(ratio_R.dtype) for side_R in (advantages_R > 0, advantages_R < 0))
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), clipped_R, lower_R)


def vespo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequences: Sequences,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Surrogate:
    """Returns VESPO's loss: -sg(w^k exp(lambda (1 - w))) A log pi, with w = exp(sum of d over the sequence).

    The kernel is 1 at w = 1 and decreases on both sides. w is the ratio of the full sequence, not normalised by its
    length.

    Args:
        logprobs_R: Log-probabilities of the current policy.
        old_logprobs_R: Log-probabilities of the sampling policy, so that w is the importance weight.
        advantages_R: Advantage of each token.
        sequences: Sequences of the tokens.
        k_pos: Exponent k where A >= 0.
        lambda_pos: Decay lambda where A >= 0.
        k_neg: Exponent k where A < 0.
        lambda_neg: Decay lambda where A < 0.

    Source: arXiv 2602.10693; TRL's `vespo` with its defaults. verl has none.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R).detach()
    advantages_R = at_least_fp32(advantages_R)
    log_weight_R = sequences.sum_R(log_ratio_R).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    positive_R = advantages_R >= 0
    k_R = torch.where(positive_R, k_pos, k_neg).to(log_weight_R.dtype)
    lambda_R = torch.where(positive_R, lambda_pos, lambda_neg).to(log_weight_R.dtype)
    weight_R = log_weight_R.exp()
    kernel_R = (lambda_R + k_R * log_weight_R - lambda_R * weight_R).exp()
    loss_R = -kernel_R * advantages_R * at_least_fp32(logprobs_R)
    zeros_R = torch.zeros_like(kernel_R)
    return Surrogate(loss_R, log_ratio_R, weight_R, zeros_R, zeros_R)
