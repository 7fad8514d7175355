"""The ranks of a replica share a call's result, or whoever's failure."""

import time

import pytest
import torch.distributed as dist

from mrl.engines.trtllm.replica import EXCHANGE_INTERVAL_S, Replica
from mrl.errors import UserError
from tests.ranks import run_ranks


def calls(steps, failing_rank, kind, stopping_rank):
    rank = dist.get_rank()

    def work():
        for _ in range(steps):
            time.sleep(EXCHANGE_INTERVAL_S / 4)
            yield
        if failing_rank == 0:
            raise kind("no room")
        return {"sum": 7}

    def check():
        if rank == failing_rank != 0:
            raise kind("loop ended")

    replica = Replica(dist.group.WORLD)
    try:
        found = replica.call(work, check=check, abort_requested=lambda: rank == stopping_rank, abort_result={})
    except (RuntimeError, UserError) as error:
        found = f"{type(error).__name__}: {error}"
    assert dist.get_world_size() == 2  # and the group is still good:
    dist.barrier()
    return found


@pytest.mark.parametrize(
    "case, expected",
    [
        ((3, None, None, None), {"sum": 7}),
        ((0, None, None, None), {"sum": 7}),
        ((3, 0, ValueError, None), "RuntimeError: rank 0's part of the engine failed: ValueError: no room"),
        ((1000, 1, OSError, None), "RuntimeError: rank 1's part of the engine failed: OSError: loop ended"),
        ((3, 0, UserError, None), "UserError: no room"),
        ((1000, None, None, 1), {}),
        ((1000, None, None, 0), {}),
    ],
)
def test_all_ranks_get_the_result_or_the_cause(case, expected):
    assert run_ranks(2, calls, *case) == [expected, expected]
