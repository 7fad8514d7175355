"""1 where the response is the answer, character for character."""

from __future__ import annotations

from typing import Any

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
    """Compares the response, without its end token, with the answer.

    Args:
        prompt: Not used.
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
    if strip:
        response, answer = response.strip(), answer.strip()
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return {"score": correct if response == answer else wrong, "pred": response}


REWARD = exact_match
