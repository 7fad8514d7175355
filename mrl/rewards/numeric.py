"""1 where the last number of the response equals the answer within a tolerance."""

from __future__ import annotations

import math
import re
from typing import Any

IN_PROCESS = True

# A sign belongs to the number unless it stands between two numbers, as in 3-4.
_NUMBER = re.compile(
    r"(?:(?<![\d.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII
)


def numeric(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    rel_tolerance: float = 1e-6,
    abs_tolerance: float = 0.0,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, float | str]:
    """Compares the last number of the response with the last number of the answer.

    Args:
        prompt: Not used.
        response: Without the end token; "1,234.5", "-3" and "2e-3" are numbers.
        answer: Ground truth.
        extra: Not used.
        rel_tolerance: Allowed difference relative to the larger magnitude.
        abs_tolerance: Allowed absolute difference.
        correct: Value of an equal number.
        wrong: Value of another number, or of none.

    Returns:
        The value, and the number that the response ends with ("" for none).

    Raises:
        ValueError: There is no answer, or no number in it.
    """
    gold = last_number(answer or "")
    if gold is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    found = last_number(response)
    if found is None:
        return {"score": wrong, "pred": ""}
    equal = math.isclose(found, gold, rel_tol=rel_tolerance, abs_tol=abs_tolerance)
    return {"score": correct if equal else wrong, "pred": repr(found)}


def last_number(text: str) -> float | None:
    """The last finite number written in a text; None without one."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match.group()
    if last is None:
        return None
    value = float(last.replace(",", ""))
    return value if math.isfinite(value) else None


REWARD = numeric
