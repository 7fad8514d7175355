"""The watchdog without a training run: who is to blame, what a main thread waits for, and a job of a thousand ranks."""

import itertools
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from mrl.distributed.watchdog.hang_diagnosis import (
    GONE,
    RankState,
    are_sampling,
    caused_by_other_ranks,
    decode,
    diagnose,
    format_ranks,
)
from mrl.distributed.watchdog.stack_dump import MainThreadMonitor, failed_in_collective, main_stack
from mrl.distributed.watchdog.torchrun_agent import reported_status, with_local_addr
from tests.source import ROOT

TIMEOUT_S = 120
WAITED = RankState(
    0, "a", 100, where="step 3, gen", where_s=12.0, beat=9, waits_s=11.0, stack='  File "x.py", line 1\n    work.wait()'
)
BUSY = replace(WAITED, waits_s=None, stack='  File "mine.py", line 5\n    time.sleep(9)')


def job(**changed):
    """Four ranks on two hosts, all waiting but for the changed ones: `r2=state`."""
    states = {rank: replace(WAITED, rank=rank, host="ab"[rank // 2], pid=100 + rank) for rank in range(4)}
    for name, state in changed.items():
        rank = int(name[1:])
        states[rank] = replace(state, rank=rank, host=states[rank].host, pid=states[rank].pid)
    return states


def test_a_state_survives_the_store():
    assert decode(BUSY.encode()) == BUSY


def test_ranks_are_named_in_short():
    assert format_ranks([5]) == "rank 5"
    assert format_ranks([9, 0, 1, 2, 4]) == "ranks 0-2, 4, 9"


def test_the_rank_that_does_not_wait_is_late():
    told = diagnose(job(r2=BUSY), {}, 4).splitlines()
    assert told[0] == "rank 2 (host b, process 102) is late: ranks 0-1, 3 have waited 11 s in a collective."
    assert told[1] == "rank 2 (host b, process 102), at step 3, gen for 12 s:"
    assert told[3].strip() == "time.sleep(9)"
    assert told[4].startswith("One of the waiting ranks, rank 0 (host a, process 100), at step 3, gen for 12 s:")


def test_a_rank_whose_process_has_ended_is_gone_and_its_host_is_not():
    told = diagnose(job(), {3: GONE}, 4)
    assert told.startswith(
        "rank 3 (host b, process 103) is gone: its process has ended. Its last report came from step 3, gen"
    )
    assert "No rank of this job answers" not in told


def test_a_host_of_which_nobody_answers_is_named():
    silent = dict.fromkeys((2, 3), "has not answered for 45 s")
    told = diagnose(job(), silent, 4).splitlines()
    assert told[0] == "No rank of this job answers on host b: ranks 2-3."
    assert told[1].startswith("rank 2 (host b, process 102) has not answered for 45 s.")


def test_of_a_thousand_lost_ranks_four_are_described():
    states = {rank: replace(WAITED, rank=rank) for rank in range(1000)}
    told = diagnose(states, dict.fromkeys(range(1000), "has not answered for 45 s"), 1000)
    assert len(told.splitlines()) == 6 and "... and 996 more: ranks 4-999" in told


def test_ranks_that_never_came_are_named():
    states = job()
    del states[1]
    assert diagnose(states, {}, 4).startswith("rank 1 never started.")


def test_a_rank_that_left_is_named_and_one_that_is_done_is_not():
    told = diagnose(job(r0=replace(WAITED, left="done"), r3=replace(WAITED, left="KeyboardInterrupt")), {}, 4)
    assert told.startswith("rank 3 (host b, process 103) left the job at step 3, gen: KeyboardInterrupt.")


def test_collectives_that_do_not_meet_are_shown_side_by_side():
    other = replace(WAITED, stack="  elsewhere")
    told = diagnose(job(r3=other), {}, 4)
    assert told.startswith("ranks 0-3 wait for each other, in collectives that do not match or cannot complete.")
    assert "rank 0 (host a" in told and "rank 3 (host b" in told and "rank 1 (host a" not in told


SAMPLES = replace(BUSY, sampled_s=1.0)


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({"r2": SAMPLES, "r3": SAMPLES}, True),
        ({"r2": SAMPLES, "r3": replace(SAMPLES, sampled_s=7.0)}, False),
        ({"r2": replace(WAITED, sampled_s=1.0)}, True),
        ({"r2": replace(WAITED, sampled_s=7.0)}, False),
        ({"r1": BUSY, "r2": SAMPLES}, False),
        ({"r2": BUSY}, False),
        ({}, False),
    ],
    ids=["all sample", "one stands still", "between two", "none for long", "one trains", "it never sampled", "nobody"],
)
def test_ranks_that_make_forwards_are_waited_for(changed, goes_on):
    assert are_sampling(job(**changed), 6.0) == goes_on


def test_a_failed_collective_is_blamed_on_itself_only_if_all_are_there():
    broken = {rank: replace(state, broken="Connection closed") for rank, state in job().items()}
    assert not caused_by_other_ranks(broken, {}, 4)
    assert caused_by_other_ranks(broken, {2: GONE}, 4)
    assert caused_by_other_ranks({**broken, 1: BUSY}, {}, 4)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


class Looks:
    """What another thread sees of this one, every tenth of a second."""

    def __init__(self, **options):
        self.options = options

    def __enter__(self):
        self.seen, self.stack, self.end = [], "", threading.Event()
        self.thread = threading.Thread(target=self.poll)
        self.thread.start()
        return self

    def poll(self):
        main = MainThreadMonitor(**self.options)
        while not self.end.wait(0.1):
            self.seen.append(main.poll())
            self.stack = self.stack or main_stack()

    def __exit__(self, *error):
        self.end.set()
        self.thread.join()


@pytest.mark.timing
def test_a_wait_in_native_code_for_another_rank_is_seen_and_grows(store):
    """The looks come every tenth of a second: starved ones would see none of a wait of 1.5 s."""
    with Looks() as looks, pytest.raises(RuntimeError) as raised:
        store.wait(["never"], timedelta(seconds=1.5))
    assert max(seen for seen in looks.seen if seen is not None) > 0.8
    assert "test_a_wait_in_native_code" in looks.stack and "store.wait(" in looks.stack
    assert failed_in_collective(raised.value)


@pytest.mark.timing
def test_many_short_waits_are_not_one_long_wait(store):
    """A process that gets no processor for half a second waits that long indeed."""
    other = store.clone()

    def answer():
        for number in range(100):
            time.sleep(0.01)
            other.set(f"short {number}", "")

    thread = threading.Thread(target=answer)
    thread.start()
    with Looks() as looks:
        for number in range(100):
            store.wait([f"short {number}"], timedelta(seconds=30))
    thread.join()
    assert max((seen for seen in looks.seen if seen is not None), default=0.0) < 0.5


@pytest.mark.slow
@pytest.mark.timing
def test_any_line_that_stands_still_while_a_gpu_works_waits_for_it():
    """As `.item()` does, which has no frame of its own."""
    with Looks(device_is_busy=lambda: True) as looks:
        time.sleep(1.5)
    assert max(seen for seen in looks.seen if seen is not None) > 0.8
    turns = itertools.cycle([True, True, False])
    with Looks(device_is_busy=lambda: next(turns)) as looks:
        time.sleep(1.5)
    assert max(seen for seen in looks.seen if seen is not None) < 0.5  # begins anew whenever the device is done
    with Looks(device_is_busy=lambda: False) as looks:
        time.sleep(0.5)
    assert set(looks.seen) == {None}


def test_work_and_waits_of_python_are_not_waits_for_other_ranks():
    with Looks() as looks:
        threading.Event().wait(0.5)
        time.sleep(0.5)
    assert set(looks.seen) == {None}
    try:
        raise RuntimeError("of a reward")
    except RuntimeError as error:
        assert not failed_in_collective(error)


THOUSAND = """
import os, sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from mrl.distributed.launcher_env import LauncherEnv
from mrl.distributed.watchdog.hang_diagnosis import RankState
from mrl.distributed.watchdog.watchdog import Watchdog
store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
for rank in range(1, 1000):
    store.set(f"watchdog/beat/{rank}", RankState(rank, f"node{rank // 8}", rank, where="step 7, gen").encode())
store.add("watchdog/came", 999)
dog = Watchdog(LauncherEnv(0, 1000, 0, 8, 125), collective_timeout_s=60, heartbeat_timeout_s=1, advice=lambda: "advice")
dog.start(store)
time.sleep(60)
"""


@pytest.mark.slow
def test_one_of_a_thousand_ranks_reads_all_the_others_and_ends():
    done = subprocess.run(
        [sys.executable, "-c", THOUSAND], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 70, done.stderr
    told = done.stderr.splitlines()
    assert told[0] == "mrl: error: No rank of this job answers on host node0: ranks 1-7."
    assert told[4] == "... nor on 121 more hosts."
    assert told[9:] == ["... and 995 more: ranks 5-999", "advice"]


class Failure:
    def __init__(self, exitcode, timestamp):
        self.exitcode, self.timestamp = exitcode, timestamp


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ({0: (2, 10), 1: (-15, 11)}, 2),
        ({0: (75, 10), 1: (75, 10)}, 75),
        ({0: (-9, 10), 1: (70, 15)}, 70),
        ({0: (-9, 10), 1: (-15, 11)}, None),
        ({0: (1, 10), 1: (143, 11)}, None),
    ],
)
def test_the_status_of_the_launcher(failures, status):
    assert reported_status({rank: Failure(*failure) for rank, failure in failures.items()}) == status


def test_a_rendezvous_is_told_this_hosts_address():
    words = ["--rdzv-endpoint", "127.0.0.1:29500", "-m", "mrl"]
    assert with_local_addr(words) == ["--local-addr", "127.0.0.1", *words]
    assert with_local_addr(["--master-addr", "n0"]) == ["--master-addr", "n0"]
    given = ["--local-addr", "10.0.0.1", *words]
    assert with_local_addr(given) == given
