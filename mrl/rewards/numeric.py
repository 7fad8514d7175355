"""Equality, within a tolerance, of the number in the response's answer and the row's."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite
from mrl.rewards._final_answer import SENTENCE, final_answer
from mrl.rewards._numbers import WrittenNumber, last_number

IN_PROCESS = True


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
    """Compares the last number of the response's answer with the last number of the row's.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token; its reasoning is ignored. "1,234.5", "-3", "2e-3", "1/2" and "50%" are
            numbers; 50% equals 50 and 0.5.
        answer: Ground truth, a text with a number.
        extra: Not used.
        rel_tolerance: Allowed difference relative to the larger magnitude.
        abs_tolerance: Allowed absolute difference.
        correct: Score of an equal number.
        wrong: Score of another number, or of none.

    Returns:
        "score", and "pred", the number that was read ("" for none).

    Raises:
        ValueError: The row has no answer, or no number in it.
    """
    gold = number_of(answer or "")
    if gold is None:
        raise ValueError(f"the answer {answer!r} contains no number")
    found = number_of(without_reasoning(response, prompt))
    if found is None:
        return {"score": wrong, "pred": ""}
    pairs = product(found.values, gold.values)
    if found.percent and gold.percent:
        pairs = product([found.value], [gold.value])
    equal = any(math.isclose(*pair, rel_tol=rel_tolerance, abs_tol=abs_tolerance) for pair in pairs)
    return {"score": correct if equal else wrong, "pred": repr(found.value)}


def number_of(text: str) -> WrittenNumber | None:
    """Returns the number in the final answer of a text; None if there is none.

    That is the last number of the answer in a box, in tags or after ####. After "the answer is" without a number, and
    without a final answer, it is the last number of the text.
    """
    marked = final_answer(text)
    found = None if marked is None else last_number(marked.text)
    return last_number(text) if marked is None or (found is None and marked.kind == SENTENCE) else found


def check(
    *, rel_tolerance: float = 1e-6, abs_tolerance: float = 0.0, correct: float = 1.0, wrong: float = 0.0, **others: Any
) -> None:
    """Raises ValueError for a value out of range."""
    check_finite(rel_tolerance=rel_tolerance, abs_tolerance=abs_tolerance)
    if rel_tolerance < 0 or abs_tolerance < 0:
        raise ValueError(f"rel_tolerance={rel_tolerance}, abs_tolerance={abs_tolerance}, expected numbers from 0")
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = numeric
