"""Environment with a calculator tool. With the reward `numeric`, a small model learns to use it on a laptop."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.environments.base import Observation, Tool
from mrl.environments.toolbox import ToolEnvironment

_MAX_CHARS = 1000
_MAX_BITS = 4096  # size of an integer: 9**9**9 would exhaust memory and time

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4) * 5.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression may have {_MAX_CHARS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return repr(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in _OPERATORS:
            return _checked(_OPERATORS[type(sign)](_value(inner)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _checked(_OPERATORS[type(sign)](_value(left), _value(right)))
    raise ValueError(f"'{ast.unparse(node)[:80]}' is no arithmetic")


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the number is too large")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("the result is no real number")
    result: int | float = base**exponent
    return result


def _checked(value: float) -> int | float:
    large = value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if large:
        raise ValueError("the number is too large")
    return value


class Calculator(ToolEnvironment):
    """Tool environment with `calculator`; the reward comes from the config's reward functions."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The function `calculator`."""
        return (calculator,)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Adds nothing to the prompt."""
        return Observation()


ENVIRONMENT = Calculator
