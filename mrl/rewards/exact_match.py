"""1 where the response, without its reasoning, is the answer, character for character."""

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
    """Compares the response with the answer: without its reasoning, or as a whole where the answer has reasoning too.

    Letters that Unicode can write in two ways, as e with an accent, are the same letter.

    Args:
        prompt: Read for whether the response begins inside the reasoning.
        response: Without the end token.
        answer: Ground truth.
        extra: "finish_reason" is read.
        strip: Ignore white space around both.
        ignore_case: Compare case-folded.
        require_stop: A response that was cut at its length limit is wrong.
        correct: Value of a match.
        wrong: Value of anything else.

    Returns:
        The value, and what was compared.

    Raises:
        ValueError: There is no answer.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    if require_stop and extra["finish_reason"] != "stop":
        return {"score": wrong, "pred": ""}
    if without_reasoning(answer) == answer:  # else the answer itself has the tags
        response = without_reasoning(response, prompt)
    gold, said = (_compared(text, strip=strip, ignore_case=ignore_case) for text in (answer, response))
    return {"score": correct if said == gold else wrong, "pred": said}


def _compared(text: str, *, strip: bool, ignore_case: bool) -> str:
    text = normalize("NFC", text)
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


def check(*, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = exact_match
