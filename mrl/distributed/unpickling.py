"""Differences between Python versions in what a pickle names, for restricted unpicklers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


def member_getter(refusal: Exception) -> Callable[[Any, Any], enum.Enum]:
    """Returns a `getattr` that accepts an enumeration and a member's name and raises `refusal` otherwise.

    Python 3.11.0 to 3.11.3 pickle a member as `getattr(enumeration, name)`; an unpickler that allowed `getattr` itself
    would give a pickle access to anything. Other versions pickle it as a call of the enumeration with a value.
    """

    def member(owner: Any, name: Any) -> enum.Enum:
        if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
            return owner[name]
        raise refusal

    return member


def public_module(name: str) -> str:
    """Returns the module from which every Python version imports a class: 3.13 pickles paths as `pathlib._local`."""
    return "pathlib" if name == "pathlib._local" else name
