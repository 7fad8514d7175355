"""The ledger sees what a phase took and gave back, and forgets it with the step."""

import pytest
import torch

from mrl.observability.memory_peaks import GIB, PeakMemory
from mrl.observability.timers import Timers

SIZE = 256 << 20
SLACK = 64 << 20  # of the allocator, and of what runs beside


def take():
    return torch.ones(SIZE // 4)


def test_a_phase_counts_what_it_gave_back_and_the_next_does_not():
    timers = Timers()
    if not timers.ledger.peaks and not timers.ledger._keeps_peaks:
        pytest.skip("this host keeps no peaks of the resident set")
    with timers.step(1):
        with timers.phase("idle"):
            pass
        with timers.phase("gen"), timers.phase("inner"):
            del (kept := [take()])[0]
        with timers.phase("reward"):
            kept.append(1.0)
        with timers.phase("gen"):
            pass  # the larger of two counts
    peaks = timers.ledger.peaks
    assert set(peaks) == {"idle", "gen", "reward"}
    assert abs(peaks["gen"] - peaks["idle"] - SIZE) < SLACK
    assert abs(peaks["reward"] - peaks["idle"]) < SLACK
    found = timers.ledger.metrics()
    assert found["perf/memory_gb/gen"] == peaks["gen"] / GIB
    assert peaks["idle"] / GIB - SLACK / GIB < found["perf/cpu_memory_used_gb"] < found["perf/memory_gb/gen"]
    with timers.step(2):
        assert set(timers.ledger.metrics()) == {"perf/cpu_memory_used_gb"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocators_peak_counts_and_the_runs_highest_is_kept():
    ledger = PeakMemory("cuda")
    before = torch.cuda.memory_allocated()
    ledger.begin()
    block = torch.ones(SIZE // 4, device="cuda")
    del block
    ledger.end("gen")
    ledger.begin()
    ledger.end("reward")
    assert ledger.peaks["gen"] - before >= SIZE > ledger.peaks["reward"] - before
    found = ledger.metrics()
    assert found["perf/max_memory_allocated_gb"] * GIB >= before + SIZE
    assert found["perf/device_memory_gb/gen"] > 0
