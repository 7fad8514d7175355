"""Suggestions for misspelled names and paths in error messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

NEAR = 0.6
"""Similarity (difflib's ratio, 0 to 1) above which a name is suggested."""


def nearest(name: str, known: Iterable[str], near: float = NEAR) -> str | None:
    """Returns the known name most similar to `name`, ignoring case; None: no similarity reaches `near`."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), list(by_lower), 1, cutoff=near)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], near: float = NEAR) -> str:
    """Returns the end of an error message, " Did you mean 'train'?"; "" if no known name is similar."""
    found = nearest(name, known, near)
    return f" Did you mean '{found}'?" if found else ""


def did_you_mean_path(path: str | Path) -> str:
    """Returns the end of an error message about a missing path, " Did you mean 'data/train.jsonl'?".

    Each missing part of the path is replaced by the most similar entry of its folder; "" if a part has no similar
    entry, or the path exists.
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
