"""Which known name somebody may have meant who wrote an unknown one.

Owns how like two names must be, and the question of messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.6
"""Similarity (difflib's ratio) from which on a name may have been meant."""


def nearest(name: str, known: Iterable[str], near: float = NEAR) -> str | None:
    """The known name most like `name`, capitals or not; None where none is like it by at least `near`, 0 to 1."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), 1, cutoff=near)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question behind a sentence, with a space before it: " Did you mean 'train'?"; "" where nothing is like it."""
    found = nearest(name, known)
    return f" Did you mean '{found}'?" if found else ""
