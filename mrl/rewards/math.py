r"""1 where the response's final expression equals the answer as mathematics: 1/2, 0.5 and \frac{2}{4} are one.

Parsing and comparison are math-verify's (https://github.com/huggingface/Math-Verify). Its own time limits use signals
and are off: this runs in a worker process, whose parent keeps the time.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time limits that are off

IN_PROCESS = False

_BRACE = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


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
    r"""Compares the last \boxed{...} of the response, or else the last expression in it, with the answer.

    Args:
        prompt: Not used.
        response: Without the end token.
        answer: A number, LaTeX or a boxed expression.
        extra: Not used.
        require_boxed: A response without \boxed{...} is wrong.
        max_chars: A longer boxed expression is wrong; without one, only the end of the response is read.
        correct: Value of an equal expression.
        wrong: Value of anything else.

    Returns:
        The value, and the expression that was compared, as text ("" for none).

    Raises:
        ValueError: There is no answer, or it is not an expression.
    """
    if answer is None:
        raise ValueError("the row has no answer to compare with")
    boxed = last_boxed(response)
    if boxed is not None and boxed.strip() == answer.strip():
        return {"score": correct, "pred": boxed.strip()}
    gold = _gold(answer)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not a mathematical expression")
    if (boxed is None and require_boxed) or (boxed is not None and len(boxed) > max_chars):
        return {"score": wrong, "pred": ""}
    found = _parse(response[-max_chars:] if boxed is None else f"\\boxed{{{boxed}}}")
    read = "" if not found else str(found[-1]) if boxed is None else boxed.strip()
    return {"score": correct if found and _equal(gold, found) else wrong, "pred": read}


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed \boxed{...} or \fbox{...} of a text, braces balanced; None without one."""
    open_braces: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() != "}":
            open_braces.append((match.end(), len(match.group()) > 1))
        elif open_braces:
            first, is_boxed = open_braces.pop()
            if is_boxed and (last is None or first > last[0]):
                last = (first, match.start())
    return None if last is None else text[last[0] : last[1]]


@lru_cache(maxsize=1024)  # the samples of a prompt share their answer
def _gold(answer: str) -> list[Any]:
    return _parse(answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}")


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(text, parsing_timeout=None)
    return parsed


def _equal(gold: list[Any], found: list[Any]) -> bool:
    return bool(math_verify.verify(gold, found, timeout_seconds=None))


REWARD = math
