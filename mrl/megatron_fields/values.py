"""What a field of Megatron's may be set to, by its annotation.

Owns the reading of annotations: `bool`, numbers, texts, `Literal`, `Optional`, `Union`, lists and tuples, members of
Megatron's enums and torch's types, both by their name. What only Python code could give, a function or an object, is
refused. The objects themselves are made in `megatron/passed.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from mrl.megatron_fields.installed import enum_members

DTYPES = {
    "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "uint8": "uint8",
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8",
}  # fmt: skip
"""How a torch.dtype may be written, torch's names and Megatron's -> torch's."""

PLAIN = {"bool": bool, "int": int, "float": (int, float), "str": str}
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
SEQUENCES = ("list", "List", "tuple", "Tuple")


def fits(kind: str, value: Any) -> bool:
    """Whether a field with this annotation takes the value as YAML gives it."""
    return any(_fits(node, value) for node in _choices(kind))


def expected(kind: str) -> str:
    """What a field with this annotation takes, in words; "" where nothing that YAML can say."""
    words = [word for word in map(_words, _choices(kind)) if word]
    return "" if words == ["null"] else " or ".join(words)


def names_dtype(kind: str) -> bool:
    """Whether the value is a torch.dtype's name."""
    return any(ast.unparse(node) == "torch.dtype" for node in _choices(kind))


def enum_of(kind: str) -> str | None:
    """The enum whose members the values are, if it is one."""
    names = (node.id for node in _choices(kind) if isinstance(node, ast.Name))
    return next((name for name in names if enum_members(name)), None)


def _choices(kind: str) -> Iterator[ast.expr]:
    yield from _opened(ast.parse(kind, mode="eval").body)


def _opened(node: ast.expr) -> Iterator[ast.expr]:
    """The members of unions, and None for what is optional."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("Optional", "Union"):
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for member in members:
            yield from _opened(member)
        if node.value.id == "Optional":
            yield ast.Constant(None)
    else:
        yield node


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.Constant):
        return value is None and node.value is None
    if isinstance(node, ast.Name) and node.id in PLAIN:
        is_bool = isinstance(value, bool)
        return isinstance(value, PLAIN[node.id]) and is_bool == (node.id == "bool")  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return value in enum_members(node.id) if isinstance(value, str) else False
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "torch.dtype" and isinstance(value, str) and value in DTYPES
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Literal":
            return isinstance(value, str) and value in ast.literal_eval(_as_tuple(node.slice))
        if node.value.id in SEQUENCES and isinstance(value, list):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id in ("tuple", "Tuple") and len(inside) != len(value):
                return False
            return all(any(_fits(each, item) for each in inside) for item in value)
    return False


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return "null"
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.Name):
        return f"one of {', '.join(members)}" if (members := enum_members(node.id)) else ""
    if isinstance(node, ast.Attribute):
        return "one of float32, bfloat16, float16, uint8" if ast.unparse(node) == "torch.dtype" else ""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Literal":
            return f"one of {', '.join(map(str, ast.literal_eval(_as_tuple(node.slice))))}"
        if node.value.id in SEQUENCES:
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return f"a list of {' and '.join(dict.fromkeys(_words(each) for each in inside))}"
    return ""


def _as_tuple(node: ast.expr) -> ast.expr:
    return node if isinstance(node, ast.Tuple) else ast.Tuple([node], ast.Load())
