"""Countdown: the equation in the answer uses the given numbers and has the target as its value.

The rules are those of TinyZero. Here the value is exact, "= target" after the
equation is allowed, and so are the multiplication, division and minus signs of Unicode.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from fractions import Fraction
from typing import Any

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite
from mrl.rewards._final_answer import BOX, TAGS, final_answer

IN_PROCESS = True

MAX_CHARS = 200
"""Longest equation that is read; a longer one is wrong."""

_SIGNS = str.maketrans({"×": "*", "⋅": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})  # noqa: RUF001
_ALLOWED = set("0123456789+-*/() ")


def countdown(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    use_all: bool = True,
    format_score: float = 0.0,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, float | str]:
    """Scores the equation in the response's answer tags or box.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token; its reasoning is ignored.
        answer: JSON text {"target": 98, "numbers": [44, 19, 35]}.
        extra: Not used.
        use_all: True if each number must be used exactly once; False if each may be used at most once.
        format_score: Score of an answer in tags or a box that is not right.
        correct: Score of a right equation.
        wrong: Score of a response without an answer in tags or a box.

    Returns:
        "score", and "pred", the equation that was read ("" for none).

    Raises:
        ValueError: The row has no target or numbers.
    """
    target, numbers = _task(answer)
    marked = final_answer(without_reasoning(response, prompt))
    if marked is None or marked.kind not in (BOX, TAGS):
        return {"score": wrong, "pred": ""}
    equation = marked.text.strip().translate(_SIGNS)
    right = _is_right(equation, target, Counter(numbers), use_all=use_all)
    return {"score": correct if right else format_score, "pred": equation[:MAX_CHARS]}


def _task(answer: str | None) -> tuple[int, list[int]]:
    try:
        task = json.loads(answer or "")
        target, numbers = task["target"], task["numbers"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the answer is {answer!r:.100}, expected JSON with target and numbers") from error
    if not isinstance(numbers, list) or not numbers or not all(type(one) is int for one in (*numbers, target)):
        raise ValueError(f"the answer is {answer!r:.100}, expected integers as target and numbers")
    return target, numbers


def _is_right(equation: str, target: int, numbers: Counter[int], *, use_all: bool) -> bool:
    text, equals, value = equation.partition("=")
    if equals and value.strip() != str(target):
        return False
    if len(text) > MAX_CHARS or not set(text) <= _ALLOWED:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
        used: list[int] = []
        found = _value(tree.body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    counts = Counter(used)
    return found == target and (counts == numbers if use_all else counts <= numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Returns the exact value of an expression of + - * / and appends its integers to `used`."""
    match node:
        case ast.Constant(value=int() as number):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _value(operand, used) * (-1 if isinstance(node.op, ast.USub) else 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            one, other = _value(left, used), _value(right, used)
            match node.op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
            return one / other
    raise ValueError("the equation has other operations than + - * /")


def check(*, format_score: float = 0.0, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_finite(format_score=format_score, correct=correct, wrong=wrong)


CHECK = check
REWARD = countdown
