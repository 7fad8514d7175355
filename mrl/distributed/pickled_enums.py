"""Members of enumerations in pickles that are read with care.

Python 3.11.0 to 3.11.3 pickle a member as `getattr(enumeration, name)`, and an unpickler that gave out `getattr` would
let a pickle reach anything. Others pickle it as the enumeration called with a value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


def member_getter(refusal: Exception) -> Callable[[Any, Any], enum.Enum]:
    """What stands for `getattr` in an unpickler: it takes an enumeration and a name, and raises `refusal` otherwise."""

    def member(owner: Any, name: Any) -> enum.Enum:
        if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
            return owner[name]
        raise refusal

    return member
