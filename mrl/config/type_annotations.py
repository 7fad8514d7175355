"""Type annotations of Megatron's, vLLM's and TensorRT-LLM's fields, as text: which YAML values they accept.

Supports `bool`, numbers, strings, `Literal`, `Optional`, `Union`, `|`, lists and tuples. A type that only Python code
can construct, such as a function, accepts nothing unless `Names` lists its values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import Any

PLAIN = {"bool": bool, "int": int, "float": (int, float), "str": str}
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
SEQUENCES = ("list", "List", "tuple", "Tuple")

Names = Callable[[str], Collection[str]]
"""Returns the texts that stand for the values of a type which is none of the supported ones."""


def _nothing(_: str) -> Collection[str]:
    return ()


def fits(kind: str, value: object, names: Names = _nothing) -> bool:
    """Returns whether a field with this annotation accepts a YAML value.

    Args:
        kind: Annotation as text, for example `Optional[Literal['ring', 'tree']]`.
        value: String, number, boolean, null, list or mapping.
        names: Texts of further types, see `Names`.
    """
    return any(_fits(node, value, names) for node in _choices(kind))


def expected(kind: str, names: Names = _nothing) -> str:
    """Returns a description of the values that an annotation accepts; "" if YAML cannot express any."""
    words = [word for node in _choices(kind) if (word := _words(node, names))]
    return "" if words == ["null"] else " or ".join(words)


def choices(kind: str) -> list[str]:
    """Returns the members of a union as text; a list of the annotation itself if it is no union."""
    return [ast.unparse(node) for node in _choices(kind)]


def literals(kind: str) -> list[str]:
    """Returns every string that the annotation lists in a `Literal`."""
    found = (node for node in _choices(kind) if isinstance(node, ast.Subscript) and _name(node) == "Literal")
    return [value for node in found for value in _values(node) if isinstance(value, str)]


def _choices(kind: str) -> Iterator[ast.expr]:
    yield from _opened(ast.parse(kind, mode="eval").body)


def _opened(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the members of unions, and the constant None for an optional type."""
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
    if _name(node) in ("tuple", "Tuple") and not _is_any_length(node) and len(inside) != len(value):
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
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [item for item in items if not _is_ellipsis(item)]


def _is_any_length(node: ast.Subscript) -> bool:
    """Returns whether the annotation is `tuple[X, ...]`."""
    return isinstance(node.slice, ast.Tuple) and any(map(_is_ellipsis, node.slice.elts))


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _values(node: ast.Subscript) -> list[Any]:
    return [ast.literal_eval(each) for each in _inside(node)]
