"""Weights and rejections of samples that another policy drew than the one whose loss they are in.

Owns importance weights, their truncation and mean, the tests that reject tokens or sequences, and the off-policy mask
of sequences. The log-ratio is the actor's minus the sampler's log-probability of each response token; which weights
the actor has there, and what is done with the outcome, is the algorithm's. Nothing here has a gradient.

Names and meanings are verl's: verl/trainer/ppo/rollout_corr_helper.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import MAX_LOG_RATIO, at_least_fp32
from mrl.algorithms.functional.sequence_losses import Sequences

SURE = 1e-6
"""`binary_kl` takes no probability as nearer to 0 or 1 than this (as AReaL)."""

SMALLEST_MEAN = 1e-8
"""Weights whose mean is at most this are not divided by it."""


@dataclass(frozen=True)
class Weighing:
    """How log-ratios become weights.

    Attributes:
        level: Of a token, or the product over a response.
        upper: Largest weight.
        lower: None: larger weights are cut to `upper`; else weights outside [lower, upper] are 0 (IcePop).
        normalize: Divide by the mean over the batch.
    """

    level: Literal["token", "sequence"]
    upper: float
    lower: float | None = None
    normalize: bool = False


@dataclass(frozen=True)
class Rejection:
    """A test that a token, or a whole response, must pass.

    Attributes:
        name: As in the config: `seq_mean_k3`.
        level: Of what the statistic is.
        statistic: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l of the log-ratio l; binary_kl.
        upper: Largest value that is kept.
        lower: Smallest value that is kept, or None.
    """

    name: str
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    statistic: Literal["k1", "k2", "k3", "binary_kl"]
    upper: float
    lower: float | None = None


def raw_weights(log_ratio_R: Tensor, sequences: Sequences, level: str) -> tuple[Tensor, Tensor | None]:
    """The exponential of the log-ratio of each token, or of its sum over the response; the exponent within +-20.

    Returns:
        The weights, 0 where not trained; and for `sequence` the sums of log-ratios [B], not clamped.
    """
    logs_B = None
    if level == "sequence":
        logs_B = sequences.sums_B(log_ratio_R)
        log_ratio_R = logs_B[sequences.sequence_R]
    weights_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(sequences.mask_R, weights_R, 0.0), logs_B


def bounded(raw_R: Tensor, weighing: Weighing) -> Tensor:
    """Truncated importance weights (arXiv 1802.01561, section 4.1), or IcePop's: 0 outside the bounds."""
    if weighing.lower is None:
        return raw_R.clamp(max=weighing.upper)
    return torch.where((raw_R >= weighing.lower) & (raw_R <= weighing.upper), raw_R, 0.0)


def mean_weight(weights_R: Tensor, sequences: Sequences, level: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: mean weight of the trained tokens, or of the responses; 1 where it is nearly 0.

    Args:
        weights_R: From `bounded`.
        sequences: Of this rank.
        level: "token" or "sequence".
        reduce: Elementwise sum over the ranks; called once.

    Returns:
        fp64 scalar.
    """
    weights_R, lens_B = weights_R.double(), sequences.lens_B
    if level == "sequence":
        total, count = sequences.means_B(weights_R).sum(), (lens_B > 0).sum()
    else:
        total, count = sequences.sums_B(weights_R).sum(), lens_B.sum()
    total, count = reduce(torch.stack([total, count.double()])).unbind()
    mean = total / count.clamp(min=1.0)
    return torch.where(mean > SMALLEST_MEAN, mean, 1.0)


def statistic(rejection: Rejection, actor_R: Tensor, sampler_R: Tensor, sequences: Sequences) -> Tensor:
    """What a rejection tests: [R] for tokens, else [B].

    Args:
        rejection: The test.
        actor_R: The actor's log-probability of each response token, nats.
        sampler_R: The sampler's.
        sequences: Of this batch, or part of it.
    """
    log_R = (actor_R - sampler_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if rejection.statistic == "k1":
        value_R = -log_R
    elif rejection.statistic == "k2":
        value_R = 0.5 * log_R.square()
    elif rejection.statistic == "k3":
        value_R = log_R.exp() - 1.0 - log_R
    else:
        value_R = binary_kl(actor_R, sampler_R)
    if rejection.level == "token":
        return value_R
    if rejection.level == "seq_sum":
        return sequences.sums_B(value_R)
    return sequences.means_B(value_R) if rejection.level == "seq_mean" else sequences.largest_B(value_R)


def binary_kl(actor_R: Tensor, sampler_R: Tensor) -> Tensor:
    """KPop's divergence: the larger of both KLs between two choices, the sampled token and all others, nats.

    Source: https://ringtech.notion.site/kpop; AReaL, docs/en/algorithms/grpo_series.md.
    """
    p_R, q_R = (logs_R.exp().clamp(SURE, 1.0 - SURE) for logs_R in (actor_R, sampler_R))
    log_R, log_other_R = p_R.log() - q_R.log(), (-p_R).log1p() - (-q_R).log1p()
    forward_R = p_R * log_R + (1.0 - p_R) * log_other_R
    reverse_R = -q_R * log_R - (1.0 - q_R) * log_other_R
    return torch.maximum(forward_R, reverse_R)


def passes(rejection: Rejection, value: Tensor) -> Tensor:
    """Where the statistic is within its bounds, bool."""
    below = value <= rejection.upper
    return below if rejection.lower is None else below & (value >= rejection.lower)


def off_policy_kept(
    actor_R: Tensor, sampler_R: Tensor, advantages_R: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """Where the off-policy sequence mask keeps the policy loss, bool [R].

    Dropped are tokens with a negative advantage in responses whose mean of log(sampler / actor) exceeds `threshold`.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking.
    """
    drift_B = sequences.means_B(at_least_fp32(sampler_R) - at_least_fp32(actor_R))
    return (advantages_R >= 0) | (drift_B <= threshold)[sequences.sequence_R]
