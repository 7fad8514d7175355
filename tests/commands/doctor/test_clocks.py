import time

import pytest
import torch

from mrl.commands.doctor.clocks import MAX_SKEW_S, check_clocks, clock_offset
from tests.ranks import run_ranks


def offset_of_rank(ahead_s):
    """The offsets of two ranks, the second with a clock that is ahead."""
    rank = torch.distributed.get_rank()
    return clock_offset(rank, [0, 1], lambda: time.time_ns() + int(ahead_s * 1e9) * rank)


def test_a_clock_that_is_ahead_is_measured():
    first, second = run_ranks(2, offset_of_rank, 30.0)
    assert first is None
    ahead, error = second
    assert abs(ahead - 30.0) <= error < MAX_SKEW_S
    assert run_ranks(2, offset_of_rank, 0.0)[1][0] == pytest.approx(0, abs=MAX_SKEW_S)


@pytest.mark.parametrize(
    ("ahead", "error", "level"),
    [(0.001, 0.01, "ok"), (-0.9, 0.0, "ok"), (3.0, 2.5, "ok"), (-3.0, 0.1, "warning"), (400.0, 0.1, "problem")],
)
def test_how_far_apart_clocks_may_be(ahead, error, level):
    (only,) = check_clocks({"b": (0.0, 5.0), "c": (ahead, error)})
    assert only.level == level and "c's is" in only.found
