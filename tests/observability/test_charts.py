"""Charts, as bokeh is given them: true values, spikes kept, values that are not finite shown, names never markup."""

import base64
import html
import json
import math
import re
import sys

import numpy as np
import pytest

from mrl.observability.charts import COLOURS, FLAT, MAX_POINTS, Series, line_chart, smooth, stacked_bars

ROUNDING = 1e-9  # running sums of numbers below 1e6 in fp64


def given(chart):
    """The plot of a chart, opened: its scale, and {name: columns} or [(columns)] of what is drawn."""
    document = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart)[1]))["doc"]
    known = {}
    return opened(document["roots"][0], known)


def opened(value, known):
    """Bokeh's JSON as plain values: objects as dicts of their attributes, references followed, arrays as lists."""
    if isinstance(value, list):
        return [opened(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "object":
        node = known.setdefault(value.get("id"), {"kind": value["name"]})
        if value["name"] == "Range1d":
            node |= {"start": 0, "end": 1}  # bokeh's defaults, which it does not write
        node |= {key: opened(item, known) for key, item in value.get("attributes", {}).items()}
        return node
    if kind == "map":
        return {opened(key, known): opened(item, known) for key, item in value["entries"]}
    if kind == "ndarray":
        order = "<" if value["order"] == "little" else ">"
        dtype = np.dtype(value["dtype"]).newbyteorder(order)
        return np.frombuffer(base64.b64decode(value["array"]["data"]), dtype).tolist()
    if kind == "number":
        return float(value["value"])
    return known[value["id"]] if set(value) == {"id"} else {key: opened(item, known) for key, item in value.items()}


def drawn(chart, name):
    """(x, y) of each renderer of that name."""
    found = []
    for renderer in given(chart)["renderers"]:
        if renderer.get("name") == name:
            data = renderer["data_source"]["data"]
            found.append(list(zip(data["x"], data["y"], strict=True)))
    return found


def scale(chart):
    axis = given(chart)["y_range"]
    return axis["start"], axis["end"]


def test_bokeh_is_given_the_points():
    points = [(0.0, 0.0), (5.0, 10.0), (10.0, 5.0)]
    chart = line_chart("t", [Series("a", points, dots=True)])
    assert drawn(chart, "line") == drawn(chart, "dots") == [points]
    low, high = scale(chart)
    assert low == 0.0 and 10.0 < high < 11.0


def test_a_spike_survives_thinning_and_the_smoothed_line_is_beside_it():
    points = [(float(i), 0.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    chart = line_chart("t", [Series("a", points)])
    (raw,), (line,) = drawn(chart, "raw"), drawn(chart, "line")
    assert (54_321.0, 9.0) in raw and 2 < len(raw) <= MAX_POINTS + 2
    assert max(y for _, y in line) < 0.01 and len(line) <= MAX_POINTS + 2


def test_values_that_are_not_finite_break_the_line_and_are_marked():
    chart = line_chart("t", [Series("a", [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, math.inf), (5.0, 1.0)])])
    (line,), (bad,) = drawn(chart, "line"), drawn(chart, "bad")
    assert [math.isnan(y) for _, y in line] == [False, True, False, True, False]
    assert [x for x, _ in bad] == [2.0, 4.0] and {y for _, y in bad} == {scale(chart)[0]}
    marks = next(each for each in given(chart)["renderers"] if each.get("name") == "bad")
    assert marks["data_source"]["data"]["value"] == ["nan", "inf"]
    assert "2 values are not finite" in chart


@pytest.mark.parametrize(
    "points", [[(1.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1.0, math.nan)], [(1.0, -1e-12), (2.0, 1e12)]]
)
def test_degenerate_values_have_a_scale(points):
    plot = given(line_chart("t", [Series("a", points)]))
    for axis in ("x_range", "y_range"):
        assert -sys.float_info.max < plot[axis]["start"] < plot[axis]["end"] < sys.float_info.max


def test_what_is_almost_equal_is_a_flat_line():
    low, high = scale(line_chart("t", [Series("a", [(1.0, 5.0), (2.0, 5.0 + 1e-6)])]))
    assert high - low > FLAT * 5.0


def test_nothing_to_draw_is_no_figure():
    assert line_chart("t", [Series("a", [])]) == ""
    assert stacked_bars("t", [], [], y_label="s") == ""


def test_bars_stack_to_the_sum_and_many_are_averaged():
    plot = given(stacked_bars("t", [1.0, 2.0], [("a", [1.0, 2.0]), ("b", [3.0, 2.0])], y_label="s"))
    lower, upper = plot["renderers"]
    assert lower["data_source"]["data"]["y0"] == [1.0, 2.0] and upper["data_source"]["data"]["y1"] == [3.0, 2.0]
    assert upper["glyph"]["bottom"]["expr"]["fields"] == ["y0"]
    assert upper["glyph"]["top"]["expr"]["fields"] == ["y0", "y1"]
    assert [bar["glyph"]["fill_color"]["value"] for bar in (lower, upper)] == list(COLOURS[:2])
    steps = [float(i) for i in range(1, 1001)]
    data = given(stacked_bars("t", steps, [("a", steps)], y_label="s"))["renderers"][0]["data_source"]["data"]
    assert len(data["x"]) <= 80 and data["y0"] == data["x"]


def test_a_name_is_text_and_never_markup_or_tex():
    hostile = "</script><b onmouseover=alert(1)>'\"& $$x$$ @y{%s}"
    chart = line_chart(hostile, [Series(hostile, [(1.0, 1.0)]), Series("b", [(1.0, 2.0)])])
    assert "<b " not in chart and "</script>" not in chart
    assert html.unescape(chart).count(hostile) == 3  # title, its label, legend
    tooltips = [tool["tooltips"] for tool in given(chart)["toolbar"]["tools"] if tool["kind"] == "HoverTool"]
    assert tooltips == [[["step", "@x{%.5g}"], [hostile, "@y{%.4g}"]], [["b", "@y{%.4g}"]]]


def test_smoothing_keeps_a_straight_line_and_the_mean():
    line = [(float(i), 2.0 * i) for i in range(400)]
    assert all(abs(y - 2.0 * x) < ROUNDING for x, y in smooth(line)[10:-10])
    flipped = [(float(i), float(i % 2)) for i in range(400)]
    assert all(abs(y - 0.5) < 0.1 for _, y in smooth(flipped)[20:-20])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_short_line_marks_every_point(count):
    points = [(float(step), step / 2) for step in range(1, count + 1)]
    assert drawn(line_chart("t", [Series("a", points)]), "dots") == [points]
    assert drawn(line_chart("t", [Series("a", [*points, *((step + 10.0, 1.0) for step in range(6))])]), "dots") == []


@pytest.mark.parametrize("value", [0.5, -3.0, 1e6])
def test_a_lone_value_stands_in_the_middle_of_an_axis_of_few_digits(value):
    low, high = scale(line_chart("t", [Series("a", [(1.0, value)])]))
    assert (low + high) / 2 == pytest.approx(value)
    assert high - low > 0.1 * abs(value)
