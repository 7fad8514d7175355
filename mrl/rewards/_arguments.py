"""Checks of the values of a config's kwargs, by a function's annotations and by range. Imports no torch."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    list: (list, tuple),
    dict: (dict,),
    collections.abc.Sequence: (list, tuple),
    collections.abc.Mapping: (dict,),
    type(None): (type(None),),
}


def check_types(function: Callable[..., Any], kwargs: Mapping[str, Any], *, own: bool = False) -> None:
    """Checks values against the annotations of a function.

    Args:
        function: Function or class that takes the values. Plain types, unions, literals, lists and mappings are
            checked; other annotations are ignored.
        kwargs: Values by name of the parameter.
        own: True for a user's function, whose int parameters also accept floats.

    Raises:
        ValueError: A value is of another type.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - a user's annotations may name anything
        return
    for name, value in kwargs.items():
        if name in hints and not _fits(value, hints[name], own=own):
            shown = (
                getattr(hints[name], "__name__", str(hints[name])) if not get_args(hints[name]) else str(hints[name])
            )
            raise ValueError(f"{name}={value!r:.80} is of type {type(value).__name__}, expected {shown}")


def check_positive(**numbers: float) -> None:
    """Raises ValueError for a number that is not positive and finite."""
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name}={number}, expected a number above 0")


def check_finite(**numbers: float) -> None:
    """Raises ValueError for a number that is infinite or NaN."""
    for name, number in numbers.items():
        if not float("-inf") < number < float("inf"):
            raise ValueError(f"{name}={number}, expected a finite number")


def _fits(value: Any, hint: Any, *, own: bool) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one, own=own) for one in inside)
    if origin is Literal:
        return value in inside
    kind: Any = origin or hint
    if kind in (int, float):
        whole = kind is int and not own
        return not isinstance(value, bool) and isinstance(value, int if whole else (int, float))
    if kind not in _KINDS:
        return True
    if not isinstance(value, _KINDS[kind]):
        return False
    if kind in (list, collections.abc.Sequence) and len(inside) == 1:
        members: Any = value
        return all(_fits(one, inside[0], own=own) for one in members)
    return True
