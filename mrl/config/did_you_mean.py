"""Which known name somebody may have meant who wrote an unknown one.

Owns how like two names must be, and the question of messages.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

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


def did_you_mean_path(path: str | Path) -> str:
    """Returns the question behind a sentence about a path that does not exist, with a space before it.

    Each part of the path that does not exist is replaced by the entry of its folder that is most like it:
    " Did you mean 'data/train.jsonl'?"; "" where nothing is like a part, or the path exists.
    """
    found = Path()
    for part in Path(path).parts:
        if os.path.lexists(found / part):
            found /= part
            continue
        try:
            near = nearest(part, os.listdir(found))
        except OSError:  # the part before it is not a folder, or may not be read
            near = None
        if near is None:
            return ""
        found /= near
    return "" if found == Path(path) else f" Did you mean '{found}'?"
