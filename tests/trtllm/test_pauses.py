"""Pauses of the event loop: long ones, and one behind the other on several ranks."""

import time

from tests.trtllm import tiny
from tests.trtllm.conftest import FAULTS
from tests.trtllm.test_engine import assert_same
from tests.trtllm.tiny import PROMPTS, SAMPLING

HANG_S = 0.5
"""Of the hang detector; its own 300 s would be these tests' length."""


def test_a_pause_may_be_longer_than_the_hang_detectors_patience(flavour, monkeypatch, tmp_path):
    monkeypatch.setenv(FAULTS, f"hang={HANG_S}")
    weights = tiny.weights()
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        engine.sleep()
        engine.begin_update()
        time.sleep(2 * HANG_S)  # a large model's transfers
        tiny.fill(engine, weights)
        engine.finish_update(1)
        engine.wake()
        assert not engine._host.executor.hang_detector.detected()
        assert_same(engine.generate(PROMPTS, SAMPLING), tiny.native(weights).generate(PROMPTS, SAMPLING))
        time.sleep(2 * HANG_S)  # it watches the loop again, which waits for requests
        assert not engine._host.executor.hang_detector.detected()
        assert engine._host.executor.hang_detector.active
