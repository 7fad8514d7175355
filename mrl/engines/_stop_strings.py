"""Stop strings where the engine itself knows only tokens: it goes on, and the response is cut behind the string.

Owns that cut. The tokens up to it are those that would have been sampled with the string known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shortest_with(tokens: Sequence[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """How many of the tokens decode to a text that has one of the strings; None: all of them do not."""

    def has(count: int) -> bool:
        text = decode(tokens[:count])
        return any(string in text for string in strings)

    if not strings or not has(len(tokens)):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has(middle) else (middle + 1, high)
    return low
