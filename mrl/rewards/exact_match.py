"""Exact match: the response, without its reasoning, equals the answer character by character."""

from __future__ import annotations

from typing import Any
from unicodedata import normalize

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite

IN_PROCESS = True


def exact_match(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    strip: bool = True,
    ignore_case: bool = False,
    require_stop: bool = False,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, float | str]:
    """Compares the response with the answer, ignoring the response's reasoning unless the answer has reasoning too.

    Both are Unicode-normalised (NFC), so an accented letter equals its composed form.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token.
        answer: Ground truth.
        extra: Mapping with "finish_reason".
        strip: True to ignore white space around both.
        ignore_case: True to compare case-folded texts.
        require_stop: True if a response that was truncated at its length limit is wrong.
        correct: Score of a match.
        wrong: Score of any other response.

    Returns:
        "score", and "pred", the compared text.

    Raises:
        ValueError: The row has no answer.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    if require_stop and extra["finish_reason"] != "stop":
        return {"score": wrong, "pred": ""}
    if without_reasoning(answer) == answer:  # else the answer itself contains the tags
        response = without_reasoning(response, prompt)
    gold, found = (_compared(text, strip=strip, ignore_case=ignore_case) for text in (answer, response))
    return {"score": correct if found == gold else wrong, "pred": found}


def _compared(text: str, *, strip: bool, ignore_case: bool) -> str:
    text = normalize("NFC", text)
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


def check(*, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = exact_match
