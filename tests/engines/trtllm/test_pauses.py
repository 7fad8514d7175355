"""Pauses of the event loop: long ones, and one behind the other on several ranks."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.mpi_ranks import run_mpi
from tests.engines.trtllm.test_engine import assert_same
from tests.engines.trtllm.tiny import PROMPTS, SAMPLING

HANG_S = 1.5
"""Patience of the hang detector, s, instead of its own 300: above what a busy machine takes for a step."""


@pytest.mark.slow
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
        assert not engine._runtime.executor.hang_detector.detected()
        assert_same(engine.generate(PROMPTS, SAMPLING), tiny.native(weights).generate(PROMPTS, SAMPLING))
        time.sleep(2 * HANG_S)  # it watches the loop again, which waits for requests
        assert not engine._runtime.executor.hang_detector.detected()
        assert engine._runtime.executor.hang_detector.active


def refits_and_wakes(folder):
    """What a replica of two ranks samples after pauses that follow each other closely."""
    weights = tiny.weights()
    group = dist.group.WORLD
    own = Path(folder) / str(dist.get_rank())
    with tiny.engine(own, tp_group=group, timeout_s=5.0, tensor_model_parallel_size=2) as engine:
        for version in range(2):
            tiny.refit(engine, weights, version)  # the second wakes the weights first
            engine.wake()
            found = engine.generate(PROMPTS, SAMPLING)
            engine.sleep()
    return found


@pytest.mark.mpi
def test_a_rank_that_leaves_a_pause_late_does_not_miss_the_next(tmp_path):
    first, second = run_mpi(2, refits_and_wakes, str(tmp_path), **{FAULTS: "slow_exit=0.3"})
    assert_same(first, tiny.native(tiny.weights()).generate(PROMPTS, SAMPLING))
    assert_same(second, first)
