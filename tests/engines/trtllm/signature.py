"""Holds a call against `signatures.json`: what the stand-in's classes and functions let through.

Owns the reading of that file and the checks made from it: unknown, missing and doubled arguments, and types. A flavour
is the line of releases that the stand-in plays: entries and parameters with another "flavour" do not exist in it.

    @signed("tensorrt_llm._utils.set_mpi_comm")             # a function, or a method of a class
    class KvCacheConfig(Fields):                            # a class of fields, as pydantic and dataclasses make them
        entry = "tensorrt_llm.llmapi.llm_args.KvCacheConfig"
    Tag = enum_of("tensorrt_llm._torch.virtual_memory.ExecutorMemoryType")
"""

from __future__ import annotations

import ast
import copy
import enum
import functools
import inspect
import json
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

FILE = Path(__file__).with_name("signatures.json")
FLAVOUR_VARIABLE = "MRL_STANDIN_FLAVOUR"
PARSING = threading.Lock()
"""`ast.parse` of Python 3.11 fails now and then where two threads call it."""

KINDS = {kind.name: kind for kind in inspect._ParameterKind}


class SignatureError(TypeError):
    """A call that the real package would not take."""


@functools.cache
def signatures() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def flavour() -> str:
    """The line of releases played: "1.2" or "1.3"."""
    return os.environ.get(FLAVOUR_VARIABLE, "1.2")


def exists(item: dict[str, Any]) -> bool:
    return item.get("flavour", flavour()) == flavour()


def parameters(entry: str) -> list[dict[str, Any]]:
    """Of a function, method or class, in this flavour; an alias has those of what it names."""
    found = signatures()[entry]
    if not exists(found):
        raise AttributeError(f"{entry} is not in {flavour()}")
    if found["type"] == "alias":
        return parameters(found["alias_of"])
    return [item for item in found["params"] if exists(item)]


def signed(entry: str, **extra: str):
    """The decorated function takes what `entry` takes; `extra`: further keyword arguments (name -> annotation)."""
    wanted = [*parameters(entry), *({"name": n, "kind": "KEYWORD_ONLY", "annotation": a} for n, a in extra.items())]

    def decorate(function):
        names = list(inspect.signature(function).parameters)
        is_method = names[:1] == ["self"]
        signature = _signature(wanted)
        annotations = {item["name"]: item.get("annotation", "Any") for item in wanted}

        @functools.wraps(function)
        def call(*args, **kwargs):
            given = args[1:] if is_method else args
            try:
                bound = signature.bind(*given, **kwargs)
            except TypeError as error:
                raise SignatureError(f"{entry}: {error}") from None
            for name, value in bound.arguments.items():
                _check(entry, name, annotations[name], value, signature.parameters[name].kind)
            return function(*args, **kwargs)

        return call

    return decorate


def _signature(items: list[dict[str, Any]]) -> inspect.Signature:
    order = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD")
    items = [item for item in items if item["kind"] in order]
    return inspect.Signature(
        [
            inspect.Parameter(
                item["name"], KINDS[item["kind"]], default=... if "default" in item else inspect.Parameter.empty
            )
            for item in sorted(items, key=lambda item: order.index(item["kind"]))
        ]
    )


def _check(entry: str, name: str, annotation: str, value: Any, kind: Any) -> None:
    if kind is inspect.Parameter.VAR_POSITIONAL:
        values = list(value)
    elif kind is inspect.Parameter.VAR_KEYWORD:
        return
    else:
        values = [value]
    for each in values:
        if not fits(annotation, each):
            raise SignatureError(f"{entry}: {name}={each!r} is {type(each).__name__}, expected {annotation}")


def fits(annotation: str, value: Any) -> bool:
    """Whether a value is of an annotation of signatures.json."""
    return _fits(_parsed(annotation), value)


@functools.cache
def _parsed(annotation: str) -> ast.expr:
    with PARSING:
        return ast.parse(annotation, mode="eval").body


def _fits(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.BinOp):
        return _fits(node.left, value) or _fits(node.right, value)
    if isinstance(node, ast.Constant):
        return value is node.value
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if name == "list":
            return isinstance(value, list) and all(_fits(inner[0], each) for each in value)
        if name == "dict":
            return isinstance(value, dict) and all(_fits(inner[0], k) and _fits(inner[1], v) for k, v in value.items())
        return callable(value)
    name = node.attr if isinstance(node, ast.Attribute) else node.id  # type: ignore[attr-defined]
    if name in ("Any", "object"):
        return True
    if name == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return name in {each.__name__ for each in type(value).__mro__}


class Fields:
    """A class of fields that refuses unknown ones and wrong types."""

    entry: ClassVar[str]

    def __init__(self, **given: Any) -> None:
        known = {item.get("alias", item["name"]): item for item in parameters(self.entry) if item["kind"] == "FIELD"}
        for name, value in given.items():
            if name not in known:
                raise SignatureError(f"{self.entry} has no field '{name}'")
            if not fits(known[name]["annotation"], value):
                raise SignatureError(
                    f"{self.entry}: {name}={value!r} is {type(value).__name__}, expected {known[name]['annotation']}"
                )
        for name, item in known.items():
            if name not in given and "default" not in item:
                raise SignatureError(f"{self.entry} needs '{name}'")
            setattr(self, item["name"], given.get(name, _literal(item.get("default"))))


STR_ENUM = getattr(enum, "StrEnum", None) or enum.Enum("StrEnum", (), type=str)
"""Enumeration of strings; before Python 3.11 one whose `str()` differs."""


def _literal(text: str | None) -> Any:
    """A default as far as it is a literal; None where it is an expression of the real package."""
    with PARSING:
        return copy.copy(_value(text or "None"))


@functools.cache
def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def enum_of(entry: str) -> Any:
    """The enumeration that an entry describes; members are strings where their values are."""
    members = {item["name"]: ast.literal_eval(item["default"]) for item in parameters(entry)}
    kind = STR_ENUM if all(isinstance(value, str) for value in members.values()) else enum.Enum
    return kind(entry.rpartition(".")[2], members)
