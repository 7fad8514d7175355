"""How numbers, durations and model output are written for people, on the terminal and on the page."""

from __future__ import annotations

import html
import math

from mrl.errors import escaped, printable

TEXT_WIDTH = 240


def short(value: float) -> str:
    """Three significant digits: 0.812, 12.3k, 3.2e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.3g}"


def clock(seconds: float | None) -> str:
    """1:02:03 or 2:03; "?" for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, noun: str) -> str:
    """1 rank, 4 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible(text: str, most: int = TEXT_WIDTH) -> str:
    """Text on one line: line ends and other control characters as escapes, the middle of a long one left out."""
    line = "".join(map(escaped, text))
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def markup(text: str) -> str:
    """Text for HTML and its attributes: nothing in it is markup; controls but line ends and tabs become escapes."""
    return html.escape(printable(text), quote=True)
