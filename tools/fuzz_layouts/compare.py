"""Comparison of both runs of a case. Sampled tokens must be equal, metrics equal within a tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fuzz_layouts.cases import Case
from fuzz_layouts.runner import Ended

RELATIVE = 1e-4
"""Relative tolerance: fp32 sums in another order, over a few steps of Adam."""
ABSOLUTE = 2e-6
"""Absolute tolerance of metrics that are zero except for rounding: a mean advantage, a KL at ratio 1."""
TOKENS = "rollout/token_checksum"
OF_ROUNDING = ("training/rollout_probs_diff", "rollout_corr/", "training/rollout_actor_probs_pearson_corr")
"""Metrics that measure rounding itself and are not compared."""
OF_LAYOUT = ("refit/",)
"""Metrics that depend on the layout, such as transferred bytes."""
GRAD_NORM = "actor/grad_norm"
NO_GRADIENT = 1e-5
"""Gradient norm below which the gradient is pure rounding, as with equal rewards or a KL at ratio 1."""

AGREE, REFUSED = "same", "refused"
GOOD = (AGREE, REFUSED)


@dataclass(frozen=True)
class FuzzVerdict:
    """Verdict about a case.

    Attributes:
        name: "same", "refused" (as expected), "refused by one", "differs", "failed".
        why: Message, or the first metric that differs; for "same", where the comparison ended early.
        worst: Largest difference of a compared metric, in multiples of the tolerance.
    """

    name: str
    why: str = ""
    worst: float = 0.0


def judge(case: Case, alone: Ended, spread: Ended) -> FuzzVerdict:
    """Compares the endings and the metrics of both runs."""
    for side, ended in (("as one process", alone), ("at its layout", spread)):
        if ended.how == "failed":
            return FuzzVerdict("failed", f"{side}, start {ended.start}: {ended.message}")
    if spread.how == "refused" and (alone.how, alone.start) == ("refused", spread.start):
        return FuzzVerdict(REFUSED, alone.message)
    if spread.how == "refused":
        why = f"at its layout, start {spread.start}: {spread.message}"
        return FuzzVerdict(REFUSED if _is_of_layout(case, spread) else "refused by one", why)
    if alone.how == "refused":
        return FuzzVerdict("refused by one", f"as one process, start {alone.start}: {alone.message}")
    return _compare(alone.rows, spread.rows)


def _is_of_layout(case: Case, ended: Ended) -> bool:
    """Returns whether a refusal mentions ranks, or a setting that only the layout has."""
    named = case.starts[ended.start].settings
    return "rank(s)" in ended.message or any(key in ended.message for key in named)


def _compare(alone: list[dict[str, Any]], spread: list[dict[str, Any]]) -> FuzzVerdict:
    places = [[(row["phase"], row["step"]) for row in rows] for rows in (alone, spread)]
    if places[0] != places[1]:
        return FuzzVerdict("differs", f"lines of metrics.jsonl: {places[0]} as one process, {places[1]} at its layout")
    worst, first, ended = 0.0, "", ""
    for one, other in zip(alone, spread, strict=True):
        where = f"{one['phase']} step {one['step']}"
        if one.keys() != other.keys():
            return FuzzVerdict("differs", f"{where}: only one side has {sorted(one.keys() ^ other.keys())}")
        if ended:
            continue
        for name in filter(_is_compared, one):
            times = _times_allowed(name, one[name], other[name])
            worst = max(worst, times)
            if times > 1 and not first:
                first = f"{where}, {name}: {one[name]!r} as one process, {other[name]!r} at its layout"
        if _is_rounding(one) and _is_rounding(other):
            ended = f"compared up to {where}: its gradient is pure rounding, which Adam amplifies to full steps"
    return FuzzVerdict("differs" if first else AGREE, first or ended, worst)


def _is_rounding(row: dict[str, Any]) -> bool:
    """Returns whether the step's gradient is pure rounding; exact zeros are equal on both sides."""
    return bool(0.0 < row.get(GRAD_NORM, 0.0) < NO_GRADIENT)


def _is_compared(name: str) -> bool:
    return name not in ("phase", "step") and not name.startswith((*OF_ROUNDING, *OF_LAYOUT))


def _times_allowed(name: str, one: float, other: float) -> float:
    """Returns the difference in multiples of the tolerance."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if name == TOKENS or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / (RELATIVE * max(abs(one), abs(other)) + ABSOLUTE)
