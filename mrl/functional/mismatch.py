"""How far the engine's log-probabilities are from the actor's at the same weights.

Owns verl's `training/rollout_probs_diff_*` and the estimates of KL(rollout || actor), as sums that add up over
microbatches and data-parallel ranks. Correcting the mismatch is in `importance`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.functional.importance import log_ratio
from mrl.functional.kl import kl_penalty

ROUNDING = 1e-12
"""A spread below this part of the sum of squares is rounding: the probabilities are constant."""


def mismatch_sums(rollout_logprobs_R: Tensor, actor_logprobs_R: Tensor, mask_R: Tensor) -> tuple[Tensor, Tensor]:
    """What `mismatch_metrics` needs of one part of the batch.

    Args:
        rollout_logprobs_R: Captured at sampling time, nats.
        actor_logprobs_R: The same tokens scored by the actor at the weights that sampled, nats.
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
    """Metrics from the added sums and the largest difference, under verl's names.

    p is exp(rollout log-probability), q is exp(actor log-probability):

    - training/rollout_probs_diff_valid: 1 where any token counts, else 0 (and the others mean nothing).
    - training/rollout_probs_diff_{mean,max,std}: of |q - p|; std is unbiased.
    - training/rollout_actor_probs_pearson_corr: correlation of p and q; where one of them is constant it is not
      defined, and 1 stands for equal, 0 for different.
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
