"""Phases: their times, their nesting, and which one runs."""

import time

import pytest

from mrl.observability.timers import CurrentPhase, Timers

NAP_S = 0.02
SLACK_S = 0.5  # a loaded machine wakes late


def test_phases_add_up_within_a_step_and_are_forgotten_after_it():
    timers = Timers()
    with timers.step(1):
        for _ in range(2):
            with timers.phase("gen"):
                time.sleep(NAP_S)
        with timers.phase("update_actor"), timers.phase("forward"):
            time.sleep(NAP_S)
    found = timers.metrics()
    assert set(found) == {"timing_s/gen", "timing_s/update_actor", "timing_s/update_actor/forward", "timing_s/step"}
    assert 2 * NAP_S <= found["timing_s/gen"] < 2 * NAP_S + SLACK_S
    assert found["timing_s/update_actor/forward"] <= found["timing_s/update_actor"]
    assert found["timing_s/gen"] + found["timing_s/update_actor"] <= found["timing_s/step"]
    with timers.step(2):
        assert set(timers.metrics()) == {"timing_s/step"}


def test_where_names_step_and_phase_and_tells_each_new_phase():
    told, current = [], CurrentPhase()
    timers = Timers(on_phase=told.append, current=current)
    assert current.describe() == "the start"
    with timers.step(7):
        assert current.describe() == "step 7, between phases"
        with timers.phase("update_actor"), timers.phase("forward"):
            assert current.describe() == "step 7, update_actor/forward"
    assert told == ["step 7, update_actor", "step 7, update_actor/forward"]


def test_after_an_error_where_names_the_phase_that_failed():
    current = CurrentPhase()
    timers = Timers(current=current)
    with pytest.raises(KeyError), timers.step(3), timers.phase("update_actor"), timers.phase("forward"):
        raise KeyError("x")
    assert current.describe() == "step 3, update_actor/forward"
    with timers.phase("gen"):
        assert current.describe() == "step 3, gen"
