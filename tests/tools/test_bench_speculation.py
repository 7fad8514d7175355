"""The benchmark samples the same bits with drafts as without, and says how often they came true."""

import importlib

import pytest

from tests.source import ROOT


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_speculation")


def test_text_that_repeats_is_drafted_and_other_text_is_not(tool):
    found = tool.run_case("tiny", "float32", [2], 48, 1)
    repeats, other = found["cases"]["repeats, 2 rows"], found["cases"]["random, 2 rows"]
    assert repeats["follows_frac"] > 0.9 > 0.1 > other["follows_frac"]
    assert repeats["accepted_frac"] > 0.5 and repeats["tokens_per_step"] > 1.5
    assert other["drafted_frac"] < 0.1 and other["ratio"] > 0


def test_bits_that_differ_end_the_run(tool, monkeypatch):
    bits, calls = tool.bits, []
    monkeypatch.setattr(tool, "bits", lambda rollout: calls.append(0) or (bits(rollout), len(calls)))
    with pytest.raises(RuntimeError, match="2 rows differ with drafts"):
        tool.run_case("tiny", "float32", [2], 4, 1)
