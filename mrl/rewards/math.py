r"""1 where the response's answer equals the row's as mathematics: 1/2, 0.5 and \frac{2}{4} are one.

Which part of a response is its answer is in `_final_answer.py`, how two answers are compared in `_expressions.py`.
"""

from __future__ import annotations

from typing import Any

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite, check_positive
from mrl.rewards._expressions import Read, equal, read, read_prose
from mrl.rewards._final_answer import BOX, SENTENCE, Marked, final_answer

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
    r"""Compares the answer that the response marks, or else the last expression in it, with the row's.

    Args:
        prompt: Read for whether the response begins inside the reasoning.
        response: Without the end token; what it says in its reasoning does not count.
        answer: A number, LaTeX, a boxed expression, a quantity with a unit, a letter of a choice, or words.
        extra: Not used.
        require_boxed: A response without \boxed{...} is wrong.
        max_chars: A longer marked answer is wrong; without a mark, only the end of the response is read.
        correct: Value of an equal answer.
        wrong: Value of anything else.

    Returns:
        The value, and the text that was compared ("" for none).

    Raises:
        ValueError: There is no answer, or nothing in it.
    """
    gold = read_gold(answer)
    said = without_reasoning(response, prompt)
    marked = final_answer(said)
    if require_boxed and (marked is None or marked.kind != BOX):
        return {"score": wrong, "pred": ""}
    if marked is not None and len(marked.text) > max_chars:
        return {"score": wrong, "pred": ""}
    found = read_prose(_end(said, max_chars)) if marked is None else _read(marked)
    right = equal(gold, found)
    pred = marked.text.strip() if marked is not None else str(found.found[-1]) if found.found else found.words * right
    return {"score": correct if right else wrong, "pred": pred if found else ""}


def read_gold(answer: str | None) -> Read:
    """Reads the answer of a row.

    Raises:
        ValueError: There is none, or nothing in it.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    marked = final_answer(answer)
    gold = read(answer) if marked is None else _read(marked)
    if not gold and not gold.text:
        raise ValueError(f"the answer {answer!r} says nothing that a response could be compared with")
    return gold


def _read(marked: Marked) -> Read:
    return read_prose(marked.text) if marked.kind == SENTENCE else read(marked.text)


def _end(text: str, max_chars: int) -> str:
    """The end of a text, no number or word cut in two."""
    text = text.strip()
    return text if len(text) <= max_chars else text[-max_chars:].partition(" ")[2]


def check(*, max_chars: int = 300, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_positive(max_chars=max_chars)
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = math
