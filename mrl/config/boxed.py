r"""The content of \boxed{...} in LaTeX. The rewards and the data both read it, so it stands below them."""

from __future__ import annotations

import re

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last closed \boxed{...} or \fbox{...}, braces balanced; None if there is none."""
    open_braces: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() != "}":
            open_braces.append((match.end(), len(match.group()) > 1))
        elif open_braces:
            first, is_boxed = open_braces.pop()
            if is_boxed and (last is None or first > last[0]):
                last = (first, match.start())
    return None if last is None else text[last[0] : last[1]]
