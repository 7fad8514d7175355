"""Replacement for `getattr` that lets a restricted unpickler load enumeration members.

Python 3.11.0 to 3.11.3 pickle a member as `getattr(enumeration, name)`; an unpickler that allowed `getattr` itself
would give a pickle access to anything. Other versions pickle it as a call of the enumeration with a value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


def member_getter(refusal: Exception) -> Callable[[Any, Any], enum.Enum]:
    """Returns a `getattr` that accepts an enumeration and a member's name and raises `refusal` otherwise."""

    def member(owner: Any, name: Any) -> enum.Enum:
        if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
            return owner[name]
        raise refusal

    return member
