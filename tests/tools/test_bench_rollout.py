"""The benchmark runs the real engines beside transformers, and names those that are not there."""

import importlib

import pytest
import torch

from tests.source import ROOT

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def tool(monkeypatch, forked):
    """A module that the processes of the engines can import too."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_rollout")


def assert_measured(found, *names):
    for name in names:
        figures = found["engines"][name]
        assert figures["tokens_per_s"] > 0 and figures["times_floor"] > 1 and figures["cores"] > 0
        assert set(figures["s"]) == {"median", "min", "max"}


def test_an_engine_that_is_not_installed_is_said_to_be(tool, monkeypatch):
    monkeypatch.setattr(tool, "installed", lambda: None)
    found = tool.run_case("tiny", "float32", ["native", "vllm"], 1, CPU)
    assert_measured(found, "native", "transformers")
    assert found["engines"]["vllm"] == "not installed" and found["versions"]["vllm"] is None
    assert found["ratio"] == found["engines"]["native"]["ratio"] and "refittable_price" not in found


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_ranks")
def test_vllm_runs_as_a_refit_wants_it_and_packed(tool):
    found = tool.run_case("tiny", "float32", ["vllm", "vllm_packed"], 1, CPU)
    assert_measured(found, "vllm", "vllm_packed", "transformers")
    assert found["refittable_price"] > 0 and "ratio" not in found


def test_a_response_that_ends_early_is_no_measurement(tool):
    with pytest.raises(RuntimeError, match="a response has 3 tokens, expected 64"):
        tool.check_length(3)
