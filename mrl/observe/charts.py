"""Charts as SVG text: lines and stacked bars, with axes and a legend, in the colours of the page's theme.

Owns the drawing. It knows no metric; `report.py` says what is drawn. Colours are the CSS variables --c0 .. --c7 of
`page.py`, whose script reads `data-chart` to show values under the pointer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mrl.observe.words import markup

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
MOST_POINTS = 500
MOST_BARS = 80
SMOOTH_FROM = 30
FLAT = 1e-3
"""Values that differ by less than this part of their size make a flat line, not a magnified one."""
NUM_COLOURS = 8

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line.

    Attributes:
        name: In the legend.
        points: (x, y) in ascending x; a y that is not finite is drawn as a tick at the bottom.
        dots: Draw each point, and no smoothed line.
    """

    name: str
    points: Sequence[Point]
    dots: bool = False


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "step", include: Sequence[float] = ()) -> str:
    """A figure with one or more lines; "" where no series has a point. `include`: values that the scale must hold."""
    series = [line for line in series if line.points]
    finite = [point for line in series for point in line.points if math.isfinite(point[1])]
    lost = sum(not math.isfinite(y) for line in series for _, y in line.points)
    if not series:
        return ""
    xs = [x for line in series for x, _ in line.points]
    frame = Frame(min(xs), max(xs), *_range([*include, *(y for _, y in finite)]))
    parts = [frame.axes(x_label)]
    for index, line in enumerate(series):
        parts.append(_line(frame, line, index))
        bad = [x for x, y in line.points if not math.isfinite(y)]
        parts += [f'<path class="bad" d="M{frame.x(x):.1f} {HEIGHT - BOTTOM}v-9"/>' for x in bad]
    hover = [{"name": line.name, "points": [[x, _hover(y)] for x, y in _thin(line.points)]} for line in series]
    caption = f'<p class="warn">{lost} values are not finite (red ticks).</p>' if lost else ""
    return _figure(title, "".join(parts), series_names(series), frame, hover, caption)


def stacked_bars(
    title: str, xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], *, y_label: str
) -> str:
    """A figure with one bar per x, the layers on top of each other; neighbours are averaged into at most 80 bars."""
    if not xs or not layers:
        return ""
    size = math.ceil(len(xs) / MOST_BARS)
    chunks = [range(first, min(first + size, len(xs))) for first in range(0, len(xs), size)]
    means = [[sum(values[i] for i in chunk) / len(chunk) for chunk in chunks] for _, values in layers]
    highest = max(sum(column) for column in zip(*means, strict=True)) or 1.0
    frame = Frame(xs[0] - 0.5, xs[-1] + 0.5, 0.0, highest * 1.05)
    parts = [frame.axes("step")]
    for column, chunk in enumerate(chunks):
        left, right = frame.x(xs[chunk[0]] - 0.5), frame.x(xs[chunk[-1]] + 0.5)
        base = 0.0
        for index, values in enumerate(means):
            top = base + values[column]
            y = frame.y(top)
            parts.append(
                f'<rect x="{left:.2f}" y="{y:.2f}" width="{max(0.5, (right - left) * 0.92):.2f}" '
                f'height="{max(0.0, frame.y(base) - y):.2f}" fill="{colour(index)}"/>'
            )
            base = top
    centres = [sum(xs[i] for i in chunk) / len(chunk) for chunk in chunks]
    hover = [
        {"name": name, "points": [[x, _hover(y)] for x, y in zip(centres, values, strict=True)]}
        for (name, _), values in zip(layers, means, strict=True)
    ]
    return _figure(f"{title}, {y_label}", "".join(parts), [name for name, _ in layers], frame, hover, "")


def colour(index: int) -> str:
    """CSS colour of the index-th series."""
    return f"var(--c{index % NUM_COLOURS})"


def series_names(series: Iterable[Series]) -> list[str]:
    """Legend entries."""
    return [line.name for line in series]


class Frame:
    """The plot area and its scales."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        """A scale of one single value is widened."""
        self.x_low, self.x_high = (x_low, x_high) if x_high > x_low else (x_low - 0.5, x_high + 0.5)
        self.y_low, self.y_high = y_low, y_high

    def x(self, value: float) -> float:
        """Horizontal position in the picture."""
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical position in the picture."""
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str) -> str:
        """Grid lines with their numbers."""
        parts = []
        y_ticks = ticks(self.y_low, self.y_high, 5)
        for tick, words in zip(y_ticks, tick_words(y_ticks), strict=True):
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{words}</text>')
        for tick in ticks(self.x_low, self.x_high, 6):
            if tick == int(tick):
                parts.append(
                    f'<text x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{int(tick)}</text>'
                )
        parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{markup(x_label)}</text>'
        )
        return "".join(parts)


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round numbers within [low, high], 1, 2, 2.5 or 5 times a power of ten apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) if step > 1e-9 else index * step for index in range(first, last + 1)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving mean over a twentieth of the points, so that it does not lag; finite points only."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    sums = [0.0, *itertools.accumulate(y for _, y in finite)]
    half = max(1, len(finite) // 40)
    result = []
    for index, (x, _) in enumerate(finite):
        low, high = max(0, index - half), min(len(finite), index + half + 1)
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def tick_words(values: Sequence[float]) -> list[str]:
    """Numbers of an axis, with as many digits as tell them apart."""
    largest = max((abs(value) for value in values), default=0.0)
    gap = min((b - a for a, b in itertools.pairwise(values)), default=largest or 1.0)
    unit, letter = next(((u, c) for u, c in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if largest >= u), (1.0, ""))
    unit = 1e3 if letter == "k" else unit
    digits = max(0, math.ceil(-math.log10(gap / unit) - 1e-9))
    if round(gap / unit * 10**digits) != round(gap / unit * 10 ** (digits + 1)) / 10:
        digits += 1
    if digits > 4 and largest < 1e-2:
        return [f"{value:.1e}" if value else "0" for value in values]
    return [f"{value / unit:.{digits}f}{letter if value else ''}" for value in values]


def _line(frame: Frame, line: Series, index: int) -> str:
    stroke = f'stroke="{colour(index)}"'
    if line.dots:
        dots = "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour(index)}"/>'
            for x, y in line.points
            if math.isfinite(y)
        )
        return f'<path class="line" {stroke} d="{_path(frame, line.points)}"/>{dots}'
    thin = _thin(line.points)
    if len(line.points) < SMOOTH_FROM:
        return f'<path class="line" {stroke} d="{_path(frame, thin)}"/>'
    raw = f'<path class="raw" {stroke} d="{_path(frame, thin)}"/>'
    return f'{raw}<path class="line" {stroke} d="{_path(frame, _thin(smooth(line.points)))}"/>'


def _path(frame: Frame, points: Sequence[Point]) -> str:
    """Path data; a value that is not finite breaks the line."""
    parts, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            parts.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _thin(points: Sequence[Point]) -> list[Point]:
    """About MOST_POINTS points at most: the lowest and the highest of each run of neighbours; no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for first in range(0, len(points), size):
        chunk = points[first : first + size]
        finite = [point for point in chunk if math.isfinite(point[1])] or chunk[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values with a margin; down to 0 where they are all positive and 0 is near."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high == 0:
        return 0.0, 1.0
    if 0 <= low < 0.6 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    margin = 0.06 * (high - low) if high - low > FLAT * size else FLAT * size
    return (low if low == 0.0 and high > 0 else low - margin), high + margin


def _hover(value: float) -> float | str:
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _figure(title: str, body: str, names: Sequence[str], frame: Frame, hover: object, caption: str) -> str:
    legend = ""
    if len(names) > 1:
        keys = (f'<span><i style="background:{colour(i)}"></i>{markup(name)}</span>' for i, name in enumerate(names))
        legend = f'<div class="legend">{"".join(keys)}</div>'
    scale = {"low": frame.x_low, "high": frame.x_high, "left": LEFT, "right": WIDTH - RIGHT, "series": hover}
    data = markup(json.dumps(scale))
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{markup(title)}" '
        f'data-chart="{data}">{body}<path class="cursor" d=""/></svg>'
    )
    return f"<figure><figcaption>{markup(title)}</figcaption>{legend}{svg}{caption}</figure>"
