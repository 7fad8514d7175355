"""Metrics of the mismatch between the sampler's log-probabilities and the actor's, which may have newer weights.

verl's `training/rollout_probs_diff_*`, estimates of KL(rollout || actor), perplexities and chi-square divergences, from
sums that add up over microbatches and data-parallel ranks. `rollout_correction` corrects the mismatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import MAX_LOG_RATIO, log_ratio
from mrl.algorithms.functional.kl import kl_penalty
from mrl.algorithms.functional.sequence_losses import Sequences

ROUNDING = 1e-12
"""Fraction of the sum of squares below which a variance is rounding: the probabilities are constant."""


def mismatch_sums(rollout_logprobs_R: Tensor, actor_logprobs_R: Tensor, mask_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one part's sums for `mismatch_metrics`.

    Args:
        rollout_logprobs_R: Log-probabilities captured at sampling time, nats.
        actor_logprobs_R: Log-probabilities of the same tokens by the actor before its update, nats.
        mask_R: True where the token counts.

    Returns:
        Sums [9] fp64, to be added over parts, and the largest |difference of probabilities| (fp64 scalar, 0 where no
        token counts), to be reduced by max.
    """
    rollout_R, actor_R = rollout_logprobs_R.detach()[mask_R], actor_logprobs_R.detach()[mask_R]
    p_R, q_R = rollout_R.double().exp(), actor_R.double().exp()
    diff_R = (q_R - p_R).abs()
    columns = [
        torch.ones_like(p_R),
        p_R,
        q_R,
        p_R.square(),
        q_R.square(),
        p_R * q_R,
        diff_R,
        log_ratio(rollout_R, actor_R).double(),
        kl_penalty(rollout_R, actor_R, "k3").double(),
    ]
    largest = torch.cat([diff_R, diff_R.new_zeros(1)]).max()
    return torch.stack(columns).sum(1), largest


def mismatch_metrics(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Returns the metrics of the added sums and the largest difference, under verl's names.

    p is exp(rollout log-probability), q is exp(actor log-probability):

    - training/rollout_probs_diff_valid: 1 if any token counts, else 0 (and the other metrics are meaningless).
    - training/rollout_probs_diff_{mean,max,std}: statistics of |q - p|; std is unbiased.
    - training/rollout_actor_probs_pearson_corr: correlation of p and q; if one of them is constant it is undefined, and
      1 is reported for equal, 0 for different values.
    - rollout_corr/kl, rollout_corr/k3_kl: estimates of KL(rollout || actor), k1 and k3.

    Source: verl, `verl/utils/debug/metrics.py` (calculate_debug_metrics).
    """
    count, p, q, pp, qq, pq, diff, k1, k3 = sums.double().tolist()
    num = max(count, 1.0)
    square_diff = max(pp - 2 * pq + qq, 0.0)  # sum of (q - p)^2
    variance = max(square_diff - diff * diff / num, 0.0) / max(count - 1, 1.0)
    spread_p, spread_q = pp - p * p / num, qq - q * q / num
    if spread_p > ROUNDING * pp and spread_q > ROUNDING * qq:
        corr = min(max((pq - p * q / num) / math.sqrt(spread_p * spread_q), -1.0), 1.0)
    else:
        corr = float(diff == 0)
    return {
        "training/rollout_probs_diff_valid": float(count > 0),
        "training/rollout_probs_diff_mean": diff / num,
        "training/rollout_probs_diff_max": float(largest),
        "training/rollout_probs_diff_std": math.sqrt(variance),
        "training/rollout_actor_probs_pearson_corr": corr,
        "rollout_corr/kl": k1 / num,
        "rollout_corr/k3_kl": k3 / num,
    }


def off_policy_sums(
    rollout_logprobs_R: Tensor, actor_logprobs_R: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """Returns one part's sums for `off_policy_metrics`; the part has complete sequences.

    Returns:
        Sums [10] fp64, to be added over parts; and extremes [2] fp64, to be reduced by max: the largest difference of
        log perplexities, and of its negative.
    """
    mask_R = sequences.mask_R
    rollout_R, actor_R = (
        torch.where(mask_R, logprobs_R.detach().double(), 0.0) for logprobs_R in (rollout_logprobs_R, actor_logprobs_R)
    )
    log_R = actor_R - rollout_R
    valid_B = sequences.lens_B > 0
    rollout_B, actor_B = -sequences.means_B(rollout_R)[valid_B], -sequences.means_B(actor_R)[valid_B]
    diff_B, logs_B = actor_B - rollout_B, sequences.sums_B(log_R)[valid_B].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares_R = (2.0 * log_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    columns = (
        *(actor_B.exp(), actor_B, rollout_B.exp(), rollout_B, diff_B, diff_B.abs(), diff_B.exp(), (2.0 * logs_B).exp()),
        *(torch.ones_like(diff_B), squares_R[mask_R]),
    )
    none = diff_B.new_full((1,), -torch.inf)
    extremes = torch.stack([torch.cat([diff_B, none]).max(), torch.cat([-diff_B, none]).max()])
    return torch.stack([column.sum() for column in columns]), extremes


def off_policy_metrics(sums: Tensor, extremes: Tensor, num_tokens: float) -> dict[str, float]:
    """Returns the metrics of the added sums, under verl's names; {} if no token was trained.

    - rollout_corr/{training,rollout}_{ppl,log_ppl}: mean over responses of the actor's and the sampler's perplexity,
      exp of the mean negative log-probability, and of its logarithm;
    - rollout_corr/log_ppl_diff, _abs_diff, _diff_max, _diff_min, ppl_ratio: actor relative to sampler;
    - rollout_corr/chi2_token, chi2_seq: mean of the squared probability ratio of tokens, of sequences, minus 1.

    Args:
        sums: Added sums of `off_policy_sums`.
        extremes: Reduced extremes of `off_policy_sums`.
        num_tokens: Trained tokens, over all parts.

    Source: verl, `verl/trainer/ppo/rollout_corr_helper.py` (compute_offpolicy_metrics).
    """
    *sequence_sums, chi2_seq, count, chi2_token = sums.double().tolist()
    if not count:
        return {}
    names = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff")
    found = {name: value / count for name, value in zip((*names, "ppl_ratio"), sequence_sums, strict=True)}
    found |= {"log_ppl_diff_max": float(extremes[0]), "log_ppl_diff_min": -float(extremes[1])}
    found |= {"chi2_token": chi2_token / num_tokens - 1.0, "chi2_seq": chi2_seq / count - 1.0}
    return {f"rollout_corr/{name}": value for name, value in found.items()}
