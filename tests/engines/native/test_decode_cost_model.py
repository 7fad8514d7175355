"""What steps cost: measured once on a machine, the same in all of a job, and assumed where it cannot be kept."""

import json
import time

import numpy as np
import pytest

from mrl.engines.native import decode_cost_model as module
from mrl.engines.native.decode_cost_model import ASSUMED, costs, curve, from_stored, measured
from mrl.models.kernels import build_cache


@pytest.fixture
def calls():
    return []


@pytest.fixture
def work(calls):
    """A step and its attention."""
    return calls.append, lambda *given: calls.append(given)


def test_a_curve_goes_through_its_points_and_on_and_never_falls():
    found = curve([[1, 10], [2, 8], [4, 12]], 6)
    np.testing.assert_allclose(found, [8, 8, 8, 10, 12, 14, 16])


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch, work, calls):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = costs("model", *work, 8)
    assert {1, 2, module.ROWS[-1], (module.TOKENS, 1), (module.TOKENS, module.SLOTS)} <= set(calls)
    del calls[:]
    second = costs("model", *work, 8)
    assert calls == [] and second.slot == first.slot and (second.steps == first.steps).all()
    costs("another", *work, 8)
    assert calls


def test_what_cannot_be_kept_is_assumed(tmp_path, monkeypatch, work):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assumed = from_stored(ASSUMED, 8)
    found = costs("model", *work, 8)
    assert found.slot == assumed.slot and (found.steps == assumed.steps).all()
    assert assumed.steps[8] / assumed.steps[1] == 24 / 17


def test_all_of_a_job_take_what_the_first_of_them_took(tmp_path, monkeypatch, work):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = json.dumps({"steps": [[1, 5], [2, 7]], "slot": 3.0, "drafts": 1.0})
    monkeypatch.setattr(build_cache, "first_rank_value", lambda *_: told)
    assert costs("model", *work, 2).steps.tolist() == [5.0, 5.0, 7.0]
    (kept,) = (tmp_path / "mrl" / "steps").glob("[!.]*[!k]")
    assert kept.read_text() == told


def test_long_steps_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)

    def step(_):
        began = time.thread_time()
        while time.thread_time() - began < 0.003:
            pass

    found = measured(step, lambda *_: None)
    assert [rows for rows, _ in found["steps"]] == [1, 2]
