"""The benchmark talks with tools that sleep and with tools that do not, and both sample the same tokens."""

import importlib

import pytest

from tests.source import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def tool(monkeypatch, forked):
    """A module that the processes of the ways can import too."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_episodes")


def test_what_tools_cost_is_measured(tool):
    small = tool.MODEL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    found = tool.measured(tool.Work(3, 2, 0.2, 0.001, "cpu"), ["native"], 1, small)
    assert found["ratio"] > 0 and "rounds_ratio" not in found
    assert found["turns"] == 3 * tool.TURNS and found["tokens"] > found["turns"]
    assert found["waited_s"]["median"] > 0
    assert set(found["ways"]) == {"native, tools at once", "native, tools that sleep"}
