"""verl's `rollout_corr/*` metrics of importance weights and rejections.

A tally is a dict of numbers that add up over microbatches and ranks (names that end in `max` or `min` are reduced by
max or min); `summarize` turns the reduced tallies into metrics. The weights and tests are in `rollout_correction`.

Names and meanings: verl/trainer/ppo/rollout_corr_helper.py (compute_is_metrics, compute_rs_metrics).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import MAX_LOG_RATIO
from mrl.algorithms.functional.rollout_correction import Rejection, Weighing
from mrl.algorithms.functional.sequence_losses import Sequences

PREFIX = "tally/"
"""Prefix of tally names."""

HUGE = 1e300
"""Extreme of an empty set; beyond every value."""

TINY = 1e-8
"""Number added to a mean that is a divisor, as in verl."""

Numbers = dict[str, Tensor]


class Flagged(NamedTuple):
    """Values, and where they are above or below their bounds."""

    values: Tensor
    high: Tensor
    low: Tensor


def weight_tally(
    weighing: Weighing, raw_R: Tensor, logs_B: Tensor | None, weights_R: Tensor, sequences: Sequences
) -> Numbers:
    """Returns the tally of importance weights before division by their mean.

    Args:
        weighing: Settings of the weights.
        raw_R: Weights before truncation, from `raw_weights`.
        logs_B: Sum of log-ratios of each sequence, for level `sequence`.
        weights_R: Truncated weights, from `bounded`.
        sequences: Sequences of the tokens.
    """
    upper = weighing.upper
    lower = 1.0 / upper if weighing.lower is None else weighing.lower
    if logs_B is None:
        shown, chosen = Flagged(weights_R, raw_R > upper, raw_R < lower), sequences.mask_R
    else:
        values_B = logs_B.clamp(max=MAX_LOG_RATIO).exp()
        shown = Flagged(values_B, logs_B > math.log(upper), logs_B < math.log(lower))
        chosen = sequences.lens_B > 0
    raw_B = sequences.means_B(raw_R)
    of_sequences = Flagged(sequences.means_B(weights_R), raw_B > upper, raw_B < lower)
    outside = sequences.mask_R & ((raw_R > upper) | (raw_R < lower))
    found = _tally(sequences, weights_R, weights_R, shown, chosen, of_sequences, ideal=1.0)
    return _named("is", found | {"outside": outside.sum()})


def divisor_tally(mean_B: Tensor) -> Numbers:
    """Returns the tally of the mean that divides the weights, the same for every sequence; -HUGE without sequences."""
    return _named("is", {"divisor_max": _extreme(mean_B, torch.ones_like(mean_B, dtype=torch.bool), -HUGE)})


def rejection_tally(rejection: Rejection, value: Tensor, kept_R: Tensor, sequences: Sequences) -> Numbers:
    """Returns the tally of a test: its statistic `value`, [R] or [B], and the tokens `kept_R` that pass it."""
    of_tokens = rejection.level == "token"
    value_R = value if of_tokens else value[sequences.sequence_R]
    value_B = sequences.means_B(value) if of_tokens else value
    shown, of_sequences = _flagged(rejection, value), _flagged(rejection, value_B)
    chosen = sequences.mask_R if of_tokens else sequences.lens_B > 0
    clamped_R = value_R.clamp(min=rejection.lower or 0.0, max=rejection.upper)
    found = _tally(sequences, value_R, clamped_R, shown, chosen, of_sequences, ideal=0.0)
    return _named(rejection.name, found | _masked(kept_R, sequences))


def kept_tally(kept_R: Tensor, sequences: Sequences) -> Numbers:
    """Returns the tally of the tokens that pass all tests."""
    sizes = {"tokens": sequences.mask_R.sum(), "sequences": (sequences.lens_B > 0).sum()}
    return _named("rs", sizes | _masked(kept_R, sequences))


def summarize(
    metrics: dict[str, float], weighing: Weighing | None, rejections: tuple[Rejection, ...]
) -> dict[str, float]:
    """Returns the metrics with tallies replaced by verl's metrics; no such metrics if no token was trained."""
    found = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    if weighing is not None:
        sums = _tally_of(metrics, "is")
        if sums["tokens"]:
            found |= _summary("rollout_corr/rollout_is", sums, is_rejection=False)
            if weighing.normalize:
                found["rollout_corr/rollout_is_batch_norm_factor"] = sums["divisor_max"]
            if weighing.lower is not None:
                found["rollout_corr/rollout_is_oob_ratio"] = sums["outside"] / sums["tokens"]
    for rejection in rejections:
        sums = _tally_of(metrics, rejection.name)
        if sums["tokens"]:
            prefix = f"rollout_corr/rollout_rs_{rejection.name}"
            found |= _summary(prefix, sums, is_rejection=True) | _masked_fractions(prefix, sums)
    if rejections and (sums := _tally_of(metrics, "rs"))["tokens"]:
        found |= _masked_fractions("rollout_corr/rollout_rs", sums)
    return found


def _flagged(rejection: Rejection, value: Tensor) -> Flagged:
    low = torch.zeros_like(value, dtype=torch.bool) if rejection.lower is None else value < rejection.lower
    return Flagged(value, value > rejection.upper, low)


def _tally(
    sequences: Sequences,
    values_R: Tensor,
    clamped_R: Tensor,
    shown: Flagged,
    chosen: Tensor,
    of_sequences: Flagged,
    *,
    ideal: float,
) -> Numbers:
    """Returns sums over trained tokens, over the values shown (of tokens or sequences), and over sequences."""
    mask_R, valid_B = sequences.mask_R, sequences.lens_B > 0
    values_B = of_sequences.values.double()
    clamped_R = clamped_R.double()
    return {
        "tokens": mask_R.sum(),
        "sum": _sum(values_R, mask_R),
        "clamped": _sum(clamped_R, mask_R),
        "clamped_square": _sum(clamped_R.square(), mask_R),
        "shown": chosen.sum(),
        "high": (shown.high & chosen).sum(),
        "low": (shown.low & chosen).sum(),
        "max": _extreme(shown.values, chosen, -HUGE),
        "min": _extreme(shown.values, chosen, HUGE),
        "sequences": valid_B.sum(),
        "seq_sum": _sum(values_B, valid_B),
        "seq_square": _sum(values_B.square(), valid_B),
        "seq_max": _extreme(values_B, valid_B, -HUGE),
        "seq_min": _extreme(values_B, valid_B, HUGE),
        "seq_deviation_max": _extreme((values_B - ideal).abs(), valid_B, -HUGE),
        "seq_high": (of_sequences.high & valid_B).sum(),
        "seq_low": (of_sequences.low & valid_B).sum(),
    }


def _masked(kept_R: Tensor, sequences: Sequences) -> Numbers:
    rejected_R = sequences.mask_R & ~kept_R
    return {
        "rejected": rejected_R.sum(),
        "seq_rejected": (sequences.sums_B(rejected_R.double()) > 0).sum(),
    }


def _named(name: str, numbers: Numbers) -> Numbers:
    return {f"{PREFIX}{name}/{key}": value.double() for key, value in numbers.items()}


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0.0).sum()


def _extreme(values: Tensor, mask: Tensor, none: float) -> Tensor:
    """Returns the largest (if `none` is negative) or smallest of the masked values; `none` if there are none."""
    chosen = torch.cat([torch.where(mask, values.double(), none), values.new_full((1,), none, dtype=torch.float64)])
    return chosen.max() if none < 0 else chosen.min()


def _tally_of(metrics: dict[str, float], name: str) -> dict[str, float]:
    prefix = f"{PREFIX}{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def _summary(prefix: str, sums: dict[str, float], *, is_rejection: bool) -> dict[str, float]:
    tokens, sequences = sums["tokens"], sums["sequences"]
    mean, square = sums["clamped"] / tokens, sums["clamped_square"] / tokens
    seq_mean = sums["seq_sum"] / sequences
    seq_variance = (sums["seq_square"] - sequences * seq_mean * seq_mean) / max(sequences - 1.0, 1.0)
    part = "" if is_rejection else "ratio_"
    found = {
        "mean": sums["sum"] / tokens,
        "std": math.sqrt(max(square - mean * mean, 0.0)) if tokens > 1 else 0.0,
        "max": sums["max"],
        "min": sums["min"],
        f"{part}fraction_high": sums["high"] / sums["shown"],
        f"{part}fraction_low": sums["low"] / sums["shown"],
        "seq_mean": seq_mean,
        "seq_std": math.sqrt(max(seq_variance, 0.0)) if sequences > 1 else 0.0,
        "seq_max": sums["seq_max"],
        "seq_min": sums["seq_min"],
        "seq_max_deviation": sums["seq_deviation_max"],
        "seq_fraction_high": sums["seq_high"] / sequences,
        "seq_fraction_low": sums["seq_low"] / sequences,
    }
    if not is_rejection and square > 0:
        found["eff_sample_size"] = (mean + TINY) ** 2 / square
    return {f"{prefix}_{name}": value for name, value in found.items()}


def _masked_fractions(prefix: str, sums: dict[str, float]) -> dict[str, float]:
    return {
        f"{prefix}_masked_fraction": sums["rejected"] / sums["tokens"],
        f"{prefix}_seq_masked_fraction": sums["seq_rejected"] / sums["sequences"],
    }
