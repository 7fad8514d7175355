"""Stop strings for engines that know only stop tokens: they generate past the string, and the response is cut after it.

The tokens up to the cut are the same as with an engine that knows the string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def length_to_stop_string(
    tokens: Sequence[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Returns the number of leading tokens whose text contains one of the strings; None: the complete text has none."""

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
