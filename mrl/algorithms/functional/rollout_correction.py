"""Off-policy correction: importance weights, rejection of tokens or sequences, and the off-policy sequence mask.

The log-ratio is the actor's minus the sampler's log-probability of each response token. Nothing here has a gradient.

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
"""Clamp of the probabilities in `binary_kl`, to [SURE, 1 - SURE] (as in AReaL)."""

SMALLEST_MEAN = 1e-8
"""Mean weight at or below which weights are not divided by it."""


@dataclass(frozen=True)
class Weighing:
    """Settings of the importance weights.

    Attributes:
        level: Unit of a weight: the token, or the product over a response.
        upper: Largest weight.
        lower: Smallest weight: weights outside [lower, upper] become 0 (IcePop). None: larger weights are cut to
            `upper`.
        normalize: True if weights are divided by their mean over the batch.
    """

    level: Literal["token", "sequence"]
    upper: float
    lower: float | None = None
    normalize: bool = False


@dataclass(frozen=True)
class Rejection:
    """Test that a token or response must pass to stay in the loss.

    Attributes:
        name: Name in the config, such as `seq_mean_k3`.
        level: Unit of the statistic: the token, or the sum, mean or maximum over a response.
        statistic: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l of the log-ratio l; or binary_kl.
        upper: Largest accepted value.
        lower: Smallest accepted value; None: no bound.
    """

    name: str
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    statistic: Literal["k1", "k2", "k3", "binary_kl"]
    upper: float
    lower: float | None = None


def raw_weights(log_ratio_R: Tensor, sequences: Sequences, level: str) -> tuple[Tensor, Tensor | None]:
    """Returns exp of the log-ratio of each token, or of its sum over the response; exponents are clamped to +-20.

    Returns:
        The weights [R], 0 where not trained; and for level `sequence` the unclamped sums of log-ratios [B].
    """
    logs_B = None
    if level == "sequence":
        logs_B = sequences.sums_B(log_ratio_R)
        log_ratio_R = logs_B[sequences.sequence_R]
    weights_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where(sequences.mask_R, weights_R, 0.0), logs_B


def bounded(raw_R: Tensor, weighing: Weighing) -> Tensor:
    """Returns truncated importance weights (arXiv 1802.01561, section 4.1), or IcePop's: 0 outside the bounds."""
    if weighing.lower is None:
        return raw_R.clamp(max=weighing.upper)
    return torch.where((raw_R >= weighing.lower) & (raw_R <= weighing.upper), raw_R, 0.0)


def mean_weight(weights_R: Tensor, sequences: Sequences, level: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: returns the mean weight of trained tokens or of responses; 1 if it is nearly 0.

    Args:
        weights_R: Truncated weights, from `bounded`.
        sequences: Sequences of this rank.
        level: Unit of the mean: "token" or "sequence".
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
    """Returns the statistic of a test, [R] for token-level tests, else [B].

    Args:
        rejection: Test.
        actor_R: Log-probabilities by the actor, nats.
        sampler_R: Log-probabilities by the sampler, nats.
        sequences: Sequences of the tokens.
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
    """Returns KPop's divergence, nats: the larger of both KLs between binary distributions, sampled token or not.

    Source: https://ringtech.notion.site/kpop; AReaL, docs/en/algorithms/grpo_series.md.
    """
    p_R, q_R = (logs_R.exp().clamp(SURE, 1.0 - SURE) for logs_R in (actor_R, sampler_R))
    log_R, log_other_R = p_R.log() - q_R.log(), (-p_R).log1p() - (-q_R).log1p()
    forward_R = p_R * log_R + (1.0 - p_R) * log_other_R
    reverse_R = -q_R * log_R - (1.0 - q_R) * log_other_R
    return torch.maximum(forward_R, reverse_R)


def passes(rejection: Rejection, value: Tensor) -> Tensor:
    """Returns whether the statistic is within its bounds, bool."""
    below = value <= rejection.upper
    return below if rejection.lower is None else below & (value >= rejection.lower)


def off_policy_kept(
    actor_R: Tensor, sampler_R: Tensor, advantages_R: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """Returns the tokens whose policy loss the off-policy sequence mask keeps, bool [R].

    It drops tokens with a negative advantage in responses whose mean of log(sampler / actor) exceeds `threshold`.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking.
    """
    drift_B = sequences.means_B(at_least_fp32(sampler_R) - at_least_fp32(actor_R))
    return (advantages_R >= 0) | (drift_B <= threshold)[sequences.sequence_R]
