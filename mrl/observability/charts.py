"""Charts of the report, drawn by bokeh in the reader's browser: lines and stacked bars, with hover and zoom.

A chart is an HTML figure with bokeh's JSON in an attribute; `html.py` draws it when it is scrolled into view. This
module selects the points of long runs, smooths, scales, and marks values that are not finite. Names are written as HTML
text, because bokeh would interpret some as TeX.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.embed import json_item
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

from mrl.observability.text_format import escape_html

HEIGHT = 230
MAX_POINTS = 1000
MAX_BARS = 80
SMOOTH_FROM = 30
DOTS_UP_TO = 5
"""Longest line whose points are all marked: a line of one point would show nothing."""
FLAT = 1e-3
"""Relative range below which a line is drawn flat, not magnified."""
LONE_MARGIN = 0.1
"""Margin above and below equal values, relative to them, so that the axis has labels of few digits."""
COLOURS = ("#4a84e4", "#e07f2c", "#27a375", "#bd5bae", "#a3852f", "#7773dc", "#d6575c", "#4d9db4")
"""Readable on a light and on a dark page, like `TEXT` and `BAD`."""
TEXT, BAD = "#7f8a9a", "#d9453b"

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line of a chart.

    Attributes:
        name: Text in the legend.
        points: (x, y) in ascending x; a y that is not finite is drawn as a tick at the bottom.
        dots: True to draw each point and no smoothed line.
    """

    name: str
    points: Sequence[Point]
    dots: bool = False


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "step", include: Sequence[float] = ()) -> str:
    """Returns a figure with one or more lines; "" where no series has a point.

    Args:
        title: Caption of the figure.
        series: Lines to draw.
        x_label: Label of the x axis.
        include: Values that the y axis must contain.
    """
    series = [line for line in series if line.points]
    if not series:
        return ""
    values = [y for line in series for _, y in line.points]
    low, high = _range([*include, *filter(math.isfinite, values)])
    xs = [x for line in series for x, _ in line.points]
    plot = _plot(x_label, (min(xs), max(xs)), (low, high))
    for index, line in enumerate(series):
        _draw(plot, line, index, x_label if index == 0 else "", low)
    lost = sum(not math.isfinite(y) for y in values)
    caption = f'<p class="warn">{lost} values are not finite (red ticks).</p>' if lost else ""
    return _figure(title, plot, [line.name for line in series], caption)


def stacked_bars(
    title: str, xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], *, y_label: str
) -> str:
    """Returns a figure with one stacked bar per x; neighbours are averaged into at most 80 bars.

    Args:
        title: Caption of the figure.
        xs: Positions of the bars, ascending.
        layers: (name, height at each x) of each layer, from bottom to top.
        y_label: Unit of the heights.
    """
    if not xs or not layers:
        return ""
    size = math.ceil(len(xs) / MAX_BARS)
    chunks = [range(first, min(first + size, len(xs))) for first in range(0, len(xs), size)]
    columns = {
        f"y{index}": [sum(values[i] for i in chunk) / len(chunk) for chunk in chunks]
        for index, (_, values) in enumerate(layers)
    }
    highest = max(map(sum, zip(*columns.values(), strict=True))) or 1.0
    plot = _plot("step", (xs[0] - 0.5, xs[-1] + 0.5), (0.0, highest * 1.05))
    edges = {
        "x": [(xs[chunk[0]] + xs[chunk[-1]]) / 2 for chunk in chunks],
        "width": [0.92 * (xs[chunk[-1]] - xs[chunk[0]] + 1) for chunk in chunks],
    }
    colours = [colour(index) for index in range(len(layers))]
    bars = plot.vbar_stack(
        list(columns), x="x", width="width", color=colours, line_color=None, source=ColumnDataSource(columns | edges)
    )
    names = [name for name, _ in layers]
    _hover(plot, bars[-1:], [("step", "@x{%.5g}"), *zip(names, [f"@{key}{{%.3g}}" for key in columns], strict=True)])
    return _figure(f"{title}, {y_label}", plot, names, "")


def colour(index: int) -> str:
    """Returns the CSS colour of the index-th series."""
    return COLOURS[index % len(COLOURS)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Returns a centred moving mean over a twentieth of the finite points; being centred, it does not lag."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    sums = [0.0, *itertools.accumulate(y for _, y in finite)]
    half = max(1, len(finite) // 40)
    result = []
    for index, (x, _) in enumerate(finite):
        low, high = max(0, index - half), min(len(finite), index + half + 1)
        result.append((x, (sums[high] - sums[low]) / (high - low)))
    return result


def _plot(x_label: str, xs: tuple[float, float], ys: tuple[float, float]) -> Any:
    """Creates an empty plot with its scales; the x axis of a single point is widened."""
    margin = 0.02 * (xs[1] - xs[0]) or 0.5
    plot = figure(
        height=HEIGHT, sizing_mode="stretch_width", tools="box_zoom,xpan,reset,save", active_drag="box_zoom",
        x_range=Range1d(xs[0] - margin, xs[1] + margin), y_range=Range1d(*ys), x_axis_label=x_label,
        background_fill_color=None, border_fill_color=None, outline_line_color=None,
    )  # fmt: skip
    plot.toolbar.logo, plot.toolbar.autohide = None, True
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = TEXT, 0.25
    plot.xgrid.visible = False
    plot.xaxis.ticker = BasicTicker(min_interval=1)
    for part in ("axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color"):
        setattr(plot.axis, part, TEXT)
    plot.axis.minor_tick_line_color = None
    return plot


def _draw(plot: Any, line: Series, index: int, x_label: str, bottom: float) -> None:
    """Draws a line, faint under a smoothed one where it is long, with marks at values that are not finite."""
    smoothed = not line.dots and len(line.points) >= SMOOTH_FROM
    kept = list(line.points) if line.dots else _thin(line.points)
    values = [y if math.isfinite(y) else math.nan for _, y in kept]
    style = {"alpha": 0.35, "line_width": 1} if smoothed else {"line_width": 2}
    raw = plot.line([x for x, _ in kept], values, color=colour(index), name="raw" if smoothed else "line", **style)
    if smoothed:
        xs, ys = zip(*_thin(smooth(line.points)) or [(math.nan, math.nan)], strict=True)
        plot.line(xs, ys, color=colour(index), line_width=2, name="line")
    if line.dots or len(kept) <= DOTS_UP_TO:
        plot.scatter([x for x, _ in kept], values, color=colour(index), size=6, name="dots")
    _hover(plot, [raw], [*([(x_label, "@x{%.5g}")] if x_label else []), (line.name, "@y{%.4g}")])
    bad = [(x, str(y)) for x, y in line.points if not math.isfinite(y)]
    if bad:
        xs, words = zip(*bad[:MAX_POINTS], strict=True)
        source = ColumnDataSource({"x": xs, "y": [bottom] * len(xs), "value": words})
        marks = plot.scatter("x", "y", source=source, marker="dash", angle=math.pi / 2, size=18, color=BAD, name="bad")
        _hover(plot, [marks], [(line.name, "@value")], mode="mouse")


def _hover(plot: Any, renderers: list[Any], tooltips: list[tuple[str, str]], mode: str = "vline") -> None:
    formatters = {f"@{key}": "printf" for _, text in tooltips for key in [text[1:].partition("{")[0]] if "{" in text}
    plot.add_tools(
        HoverTool(renderers=renderers, tooltips=tooltips, formatters=formatters, mode=mode, line_policy="nearest")
    )


def _thin(points: Sequence[Point]) -> list[Point]:
    """Reduces a line to about MOST_POINTS points: minimum and maximum of each interval, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[Point] = []
    for first in range(0, len(points), size):
        chunk = points[first : first + size]
        finite = [point for point in chunk if math.isfinite(point[1])] or chunk[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the y range of the values with a margin; it starts at 0 where all are positive and 0 is near."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        return low - LONE_MARGIN * abs(low), high + LONE_MARGIN * abs(high)
    if 0 <= low < 0.6 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    margin = 0.06 * (high - low) if high - low > FLAT * size else FLAT * size
    return (low if low == 0.0 and high > 0 else low - margin), high + margin


def _figure(title: str, plot: Any, names: Sequence[str], caption: str) -> str:
    legend = ""
    if len(names) > 1:
        keys = (
            f'<span><i style="background:{colour(i)}"></i>{escape_html(name)}</span>' for i, name in enumerate(names)
        )
        legend = f'<div class="legend">{"".join(keys)}</div>'
    drawing = escape_html(json.dumps(json_item(plot)))
    chart = f'<div class="chart" role="img" aria-label="{escape_html(title)}" data-chart="{drawing}"></div>'
    return f"<figure><figcaption>{escape_html(title)}</figcaption>{legend}{chart}{caption}</figure>"
