"""Charts: true scales, spikes kept, values that are not finite shown."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mrl.observe.charts import MOST_POINTS, Frame, Series, line_chart, smooth, stacked_bars, tick_words, ticks

ROUNDING = 1e-9  # running sums of numbers below 1e6 in fp64


def shapes(figure, tag):
    svg = re.search(r"<svg.*</svg>", figure, re.S).group()
    return list(ElementTree.fromstring(svg).iter(tag))


def test_a_line_goes_through_its_points():
    points = [(0.0, 0.0), (5.0, 10.0), (10.0, 5.0)]
    figure = line_chart("t", [Series("a", points, dots=True)])
    frame = Frame(0.0, 10.0, 0.0, 10.6)
    centres = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in shapes(figure, "circle")]
    for (cx, cy), (x, y) in zip(centres, points, strict=True):
        assert (cx, cy) == (round(frame.x(x), 1), round(frame.y(y), 1))


def test_a_spike_survives_thinning():
    points = [(float(i), 0.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    figure = line_chart("t", [Series("a", points)])
    raw = next(path for path in shapes(figure, "path") if path.get("class") == "raw")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", raw.get("d"))]
    assert min(heights) < 30
    assert len(heights) <= MOST_POINTS + 2


def test_values_that_are_not_finite_break_the_line_and_are_marked():
    figure = line_chart("t", [Series("a", [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, math.inf), (5.0, 1.0)])])
    line = next(path for path in shapes(figure, "path") if path.get("class") == "line")
    assert line.get("d").count("M") == 3
    assert sum(path.get("class") == "bad" for path in shapes(figure, "path")) == 2
    assert "2 values are not finite" in figure
    assert "nan" not in line.get("d")


@pytest.mark.parametrize(
    "points", [[(1.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1.0, math.nan)], [(1.0, -1e-12), (2.0, 1e12)]]
)
def test_degenerate_values_draw(points):
    assert shapes(line_chart("t", [Series("a", points)]), "path")


def test_nothing_to_draw_is_no_figure():
    assert line_chart("t", [Series("a", [])]) == ""
    assert stacked_bars("t", [], [], y_label="s") == ""


def test_bars_stack_to_the_sum():
    figure = stacked_bars("t", [1.0, 2.0], [("a", [1.0, 2.0]), ("b", [3.0, 2.0])], y_label="s")
    heights = [float(bar.get("height")) for bar in shapes(figure, "rect")]
    assert heights[0] + heights[1] == pytest.approx(heights[2] + heights[3], abs=0.02)  # two decimals are written
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.03)


def test_smoothing_keeps_a_straight_line_and_the_mean():
    line = [(float(i), 2.0 * i) for i in range(400)]
    assert all(abs(y - 2.0 * x) < ROUNDING for x, y in smooth(line)[10:-10])
    flipped = [(float(i), float(i % 2)) for i in range(400)]
    assert all(abs(y - 0.5) < 0.1 for _, y in smooth(flipped)[20:-20])


def test_ticks_are_round_and_told_apart():
    assert ticks(0.0, 1.06, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert tick_words([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_words([0.0, 1.0, 2.0]) == ["0", "1", "2"]
    assert tick_words([11000.0, 11250.0]) == ["11.00k", "11.25k"]
    assert tick_words([0.0, 2e-6]) == ["0", "2.0e-06"]
    for high in (1e-9, 0.3, 7.0, 123.0, 4e6):
        words = tick_words(ticks(0.0, high, 5))
        assert 3 <= len(words) <= 8
        assert len(set(words)) == len(words)
