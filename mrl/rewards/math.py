r"""Mathematical equality of the response's answer and the row's: 1/2, 0.5 and \frac{2}{4} are equal.

`_final_answer.py` finds the answer in a response, `_expressions.py` compares two answers.
"""

from __future__ import annotations

from typing import Any

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite, check_positive
from mrl.rewards._expressions import ParsedAnswer, equal, read, read_prose
from mrl.rewards._final_answer import BOX, SENTENCE, MarkedAnswer, final_answer

IN_PROCESS = False


def math(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    require_boxed: bool = False,
    max_chars: int = 300,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, float | str]:
    r"""Compares the final answer of the response, or without one its last expression, with the row's answer.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token; its reasoning is ignored.
        answer: A number, LaTeX, a boxed expression, a quantity with a unit, the letter of a choice, or words.
        extra: Not used.
        require_boxed: True if a response without \boxed{...} is wrong.
        max_chars: Length above which a final answer is wrong; without one, this many last characters are read.
        correct: Score of an equal answer.
        wrong: Score of any other response.

    Returns:
        "score", and "pred", the compared text ("" for none).

    Raises:
        ValueError: The row has no answer, or an empty one.
    """
    gold = parse_gold(answer)
    text = without_reasoning(response, prompt)
    marked = final_answer(text)
    if require_boxed and (marked is None or marked.kind != BOX):
        return {"score": wrong, "pred": ""}
    if marked is not None and len(marked.text) > max_chars:
        return {"score": wrong, "pred": ""}
    found = read_prose(_end(text, max_chars)) if marked is None else _read(marked)
    right = equal(gold, found)
    pred = marked.text.strip() if marked is not None else str(found.found[-1]) if found.found else found.words * right
    return {"score": correct if right else wrong, "pred": pred if found else ""}


def parse_gold(answer: str | None) -> ParsedAnswer:
    """Parses the answer of a row.

    Raises:
        ValueError: The answer is missing or contains nothing to compare.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    marked = final_answer(answer)
    gold = read(answer) if marked is None else _read(marked)
    if not gold and not gold.text:
        raise ValueError(f"the answer {answer!r} contains no expression or words to compare a response with")
    return gold


def _read(marked: MarkedAnswer) -> ParsedAnswer:
    return read_prose(marked.text) if marked.kind == SENTENCE else read(marked.text)


def _end(text: str, max_chars: int) -> str:
    """Returns the last `max_chars` of a text without a partial first word."""
    text = text.strip()
    return text if len(text) <= max_chars else text[-max_chars:].partition(" ")[2]


def check(*, max_chars: int = 300, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_positive(max_chars=max_chars)
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = math
