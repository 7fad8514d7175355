"""verl's `rollout_corr/*` metrics of weights and rejections, as numbers that add up over microbatches and ranks.

Owns what is summed (`tally`) and what is told of the sums (`told`). A tally's names end in `max` or `min` where it is
reduced by that; everything else is added. The weights and tests themselves are in `rollout_correction`.

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
"""Of the names that `told` turns into metrics."""

HUGE = 1e300
"""Beyond every value: the extreme of none."""

TINY = 1e-8
"""Added to a mean that divides, as in verl."""

Numbers = dict[str, Tensor]


class Flagged(NamedTuple):
    """Values, and where they are above or below their bounds."""

    values: Tensor
    high: Tensor
    low: Tensor


def weight_tally(
    weighing: Weighing, raw_R: Tensor, logs_B: Tensor | None, weights_R: Tensor, sequences: Sequences
) -> Numbers:
    """Of importance weights before division by their mean.

    Args:
        weighing: How they came about.
        raw_R: From `raw_weights`, before truncation.
        logs_B: Sums of log-ratios where the level is `sequence`.
        weights_R: From `bounded`.
        sequences: Whose they are.
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
    """Of what divides the weights, the same of every sequence; -HUGE where there is none."""
    return _named("is", {"divisor_max": _extreme(mean_B, torch.ones_like(mean_B, dtype=torch.bool), -HUGE)})


def rejection_tally(rejection: Rejection, value: Tensor, kept_R: Tensor, sequences: Sequences) -> Numbers:
    """Of a test's statistic, [R] or [B], and the tokens that it keeps."""
    of_tokens = rejection.level == "token"
    value_R = value if of_tokens else value[sequences.sequence_R]
    value_B = sequences.means_B(value) if of_tokens else value
    shown, of_sequences = _flagged(rejection, value), _flagged(rejection, value_B)
    chosen = sequences.mask_R if of_tokens else sequences.lens_B > 0
    clamped_R = value_R.clamp(min=rejection.lower or 0.0, max=rejection.upper)
    found = _tally(sequences, value_R, clamped_R, shown, chosen, of_sequences, ideal=0.0)
    return _named(rejection.name, found | _masked(kept_R, sequences))


def kept_tally(kept_R: Tensor, sequences: Sequences) -> Numbers:
    """Of the tokens that all tests keep."""
    sizes = {"tokens": sequences.mask_R.sum(), "sequences": (sequences.lens_B > 0).sum()}
    return _named("rs", sizes | _masked(kept_R, sequences))


def told(metrics: dict[str, float], weighing: Weighing | None, rejections: tuple[Rejection, ...]) -> dict[str, float]:
    """The metrics, with the tallies among them replaced by what verl tells of them; {} where no token was trained."""
    found = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
    if weighing is not None:
        own = _own(metrics, "is")
        if own["tokens"]:
            found |= _told("rollout_corr/rollout_is", own, is_rejection=False)
            if weighing.normalize:
                found["rollout_corr/rollout_is_batch_norm_factor"] = own["divisor_max"]
            if weighing.lower is not None:
                found["rollout_corr/rollout_is_oob_ratio"] = own["outside"] / own["tokens"]
    for rejection in rejections:
        own = _own(metrics, rejection.name)
        if own["tokens"]:
            prefix = f"rollout_corr/rollout_rs_{rejection.name}"
            found |= _told(prefix, own, is_rejection=True) | _told_masked(prefix, own)
    if rejections and (own := _own(metrics, "rs"))["tokens"]:
        found |= _told_masked("rollout_corr/rollout_rs", own)
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
    """Sums over the trained tokens, over what is shown (tokens or sequences), and over sequences."""
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
    """Largest (`none` below all) or smallest (above all) of the chosen values."""
    chosen = torch.cat([torch.where(mask, values.double(), none), values.new_full((1,), none, dtype=torch.float64)])
    return chosen.max() if none < 0 else chosen.min()


def _own(metrics: dict[str, float], name: str) -> dict[str, float]:
    prefix = f"{PREFIX}{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def _told(prefix: str, own: dict[str, float], *, is_rejection: bool) -> dict[str, float]:
    tokens, sequences = own["tokens"], own["sequences"]
    mean, square = own["clamped"] / tokens, own["clamped_square"] / tokens
    seq_mean = own["seq_sum"] / sequences
    seq_variance = (own["seq_square"] - sequences * seq_mean * seq_mean) / max(sequences - 1.0, 1.0)
    part = "" if is_rejection else "ratio_"
    found = {
        "mean": own["sum"] / tokens,
        "std": math.sqrt(max(square - mean * mean, 0.0)) if tokens > 1 else 0.0,
        "max": own["max"],
        "min": own["min"],
        f"{part}fraction_high": own["high"] / own["shown"],
        f"{part}fraction_low": own["low"] / own["shown"],
        "seq_mean": seq_mean,
        "seq_std": math.sqrt(max(seq_variance, 0.0)) if sequences > 1 else 0.0,
        "seq_max": own["seq_max"],
        "seq_min": own["seq_min"],
        "seq_max_deviation": own["seq_deviation_max"],
        "seq_fraction_high": own["seq_high"] / sequences,
        "seq_fraction_low": own["seq_low"] / sequences,
    }
    if not is_rejection and square > 0:
        found["eff_sample_size"] = (mean + TINY) ** 2 / square
    return {f"{prefix}_{name}": value for name, value in found.items()}


def _told_masked(prefix: str, own: dict[str, float]) -> dict[str, float]:
    return {
        f"{prefix}_masked_fraction": own["rejected"] / own["tokens"],
        f"{prefix}_seq_masked_fraction": own["seq_rejected"] / own["sequences"],
    }
