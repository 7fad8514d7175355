"""Formats numbers, durations and model output for the terminal and the HTML report."""

from __future__ import annotations

import html
import math

from mrl.errors import escaped, printable

TEXT_WIDTH = 240


def format_number(value: float) -> str:
    """Formats a number with three significant digits: 0.812, 12.3k, 3.2e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.3g}"


def format_duration(seconds: float | None) -> str:
    """Formats a duration as 1:02:03 or 2:03; "?" for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(number: int, noun: str) -> str:
    """Formats a count with its noun: 1 rank, 4 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible(text: str, most: int = TEXT_WIDTH) -> str:
    """Formats text on one line: control characters become escapes, and the middle of a long text is omitted."""
    line = "".join(map(escaped, text))
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def escape_html(text: str) -> str:
    """Escapes text for HTML and its attributes; control characters other than line ends and tabs become escapes."""
    return html.escape(printable(text), quote=True)
