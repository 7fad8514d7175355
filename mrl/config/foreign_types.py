"""Annotations of another package's fields, as text: which values of YAML they take, and how to say so.

Owns the reading of `bool`, numbers, texts, `Literal`, `Optional`, `Union`, `|`, lists and tuples. What only Python code
could give, a function or an object, is taken by none, except by a name that the caller knows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import Any

PLAIN = {"bool": bool, "int": int, "float": (int, float), "str": str}
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
SEQUENCES = ("list", "List", "tuple", "Tuple")

Names = Callable[[str], Collection[str]]
"""A type that is none of these -> the texts that stand for its values."""


def _nothing(_: str) -> Collection[str]:
    return ()


def fits(kind: str, value: object, names: Names = _nothing) -> bool:
    """Whether a field with this annotation takes the value as YAML gives it.

    Args:
        kind: The annotation, for example `Optional[Literal['ring', 'tree']]`.
        value: Of YAML: a text, a number, a boolean, null, a list or a mapping.
        names: See `Names`.
    """
    return any(_fits(node, value, names) for node in _choices(kind))


def expected(kind: str, names: Names = _nothing) -> str:
    """What a field with this annotation takes, in words; "" where nothing that YAML can say. Arguments as of `fits`."""
    words = [word for node in _choices(kind) if (word := _words(node, names))]
    return "" if words == ["null"] else " or ".join(words)


def choices(kind: str) -> list[str]:
    """The members of a union, as text; the annotation itself where it is none."""
    return [ast.unparse(node) for node in _choices(kind)]


def literals(kind: str) -> list[str]:
    """Every text that the annotation spells out."""
    found = (node for node in _choices(kind) if isinstance(node, ast.Subscript) and _name(node) == "Literal")
    return [value for node in found for value in _values(node) if isinstance(value, str)]


def _choices(kind: str) -> Iterator[ast.expr]:
    yield from _opened(ast.parse(kind, mode="eval").body)


def _opened(node: ast.expr) -> Iterator[ast.expr]:
    """The members of unions, and None for what is optional."""
    if isinstance(node, ast.Subscript) and _name(node) in ("Optional", "Union"):
        for member in _inside(node):
            yield from _opened(member)
        if _name(node) == "Optional":
            yield ast.Constant(None)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _opened(node.left)
        yield from _opened(node.right)
    else:
        yield node


def _fits(node: ast.expr, value: object, names: Names) -> bool:
    if isinstance(node, ast.Constant):
        return value is None and node.value is None
    if isinstance(node, ast.Subscript):
        return _fits_inside(node, value, names)
    if (kind := ast.unparse(node)) in PLAIN:
        return isinstance(value, PLAIN[kind]) and isinstance(value, bool) == (kind == "bool")  # type: ignore[arg-type]
    return isinstance(value, str) and value in names(kind)


def _fits_inside(node: ast.Subscript, value: object, names: Names) -> bool:
    if _name(node) == "Literal":
        return isinstance(value, str) and value in _values(node)
    if _name(node) not in SEQUENCES or not isinstance(value, list):
        return False
    inside = _inside(node)
    if _name(node) in ("tuple", "Tuple") and len(inside) != len(value):
        return False
    return all(any(_fits(each, item, names) for each in inside) for item in value)


def _words(node: ast.expr, names: Names) -> str:
    if isinstance(node, ast.Constant):
        return "null"
    if isinstance(node, ast.Subscript):
        if _name(node) == "Literal":
            return f"one of {', '.join(map(str, _values(node)))}"
        if _name(node) in SEQUENCES:
            return f"a list of {' and '.join(dict.fromkeys(_words(each, names) for each in _inside(node)))}"
        return ""
    known = names(kind := ast.unparse(node))
    return WORDS.get(kind) or (f"one of {', '.join(known)}" if known else "")


def _name(node: ast.Subscript) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _inside(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _values(node: ast.Subscript) -> list[Any]:
    return [ast.literal_eval(each) for each in _inside(node)]
