"""Real stores, and ranks that do not come, fail or hang."""

import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mrl.commands.doctor.bounded_gather import (
    BoundedGather,
    Deadline,
    FailedRanksError,
    JobEndedError,
    MissingRanksError,
    ranks_not_entered,
    reconnect,
)

TIMEOUT_S = 2.0
"""For a rank to come: threads of one process take milliseconds."""
BOUND_S = 15.0
"""A machine that is busy with other tests is this slow at most."""


def together(size, action, *, absent=()):
    """What `BoundedGather.stage` gives or raises on each rank, one thread for each; `absent` ranks never come."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30)) for _ in range(size)]
    results: dict[int, object] = {}

    def rank_(rank):
        deadline = Deadline(60, lambda stage: None)
        meeting = BoundedGather(PrefixStore("x", stores[rank]), rank, size, TIMEOUT_S, deadline)
        try:
            results[rank] = (meeting.stage("work", lambda: action(rank)), meeting.broadcast("word", {"of": rank}))
        except RuntimeError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_, args=(rank,)) for rank in range(size) if rank not in absent]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert time.monotonic() - start < BOUND_S
    return results, server


def test_values_come_to_rank_0_and_its_word_to_all():
    results, _ = together(3, lambda rank: rank * 10)
    assert results == {0: ([0, 10, 20], {"of": 0}), 1: (None, {"of": 0}), 2: (None, {"of": 0})}


def test_a_rank_that_does_not_come_is_named_in_time():
    results, server = together(4, lambda rank: rank, absent=(2,))
    assert isinstance(results[0], MissingRanksError) and results[0].ranks == [2]
    assert isinstance(results[1], JobEndedError) and isinstance(results[3], JobEndedError)
    assert ranks_not_entered(PrefixStore("x", reconnect(server)), "work", 4) == [2]


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_stage_is_named():
    results, server = together(2, lambda rank: time.sleep(3 * TIMEOUT_S * rank))
    assert isinstance(results[0], MissingRanksError) and results[0].ranks == [1]
    assert ranks_not_entered(PrefixStore("x", reconnect(server)), "work", 2) == []


def test_a_rank_that_fails_is_told_with_its_error():
    def action(rank):
        if rank == 1:
            raise OSError("no route to host\nmore")

    results, _ = together(2, action)
    assert isinstance(results[0], FailedRanksError) and results[0].errors == {1: "OSError: no route to host"}
    assert isinstance(results[1], JobEndedError)


def test_a_store_that_is_gone_ends_the_others():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=2))
    meeting = BoundedGather(store, 1, 2, TIMEOUT_S, Deadline(60, lambda stage: None))
    del server
    with pytest.raises(JobEndedError):
        meeting.stage("work", lambda: None)


@pytest.mark.timing
def test_a_stage_that_hangs_is_ended_from_outside():
    """A quick stage that gets no processor for the 0.2 s of its time is late."""
    late = []
    deadline = Deadline(0.2, late.append)
    with deadline.stage("quick"):
        pass
    with deadline.stage("hangs"):
        time.sleep(1)
    assert late == ["hangs"]


@pytest.mark.slow
@pytest.mark.timing
def test_a_stage_inside_of_a_stage_has_its_own_time():
    """A stage of 0.3 s that lasts 0.9 s is late."""
    late = []
    deadline = Deadline(0.9, late.append)
    with deadline.stage("outer", times=20):
        for _ in range(4):
            with deadline.stage("inner"):
                time.sleep(0.3)
        assert late == []
        with deadline.stage("hangs"):
            time.sleep(1.5)
    assert late == ["hangs"]


def test_a_stage_is_announced_when_it_starts():
    begun = []
    deadline = Deadline(60.0, begun.append, begun.append)
    for name in ("packages", "GPUs"):
        with deadline.stage(name):
            assert begun[-1] == name
    assert begun == ["packages", "GPUs"]
