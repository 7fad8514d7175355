"""Signals are requests, one order counts once, and the limits that a launcher names are read. The rest is in
tests/trainer/test_preemption.py (clocks), tests/e2e/test_stop.py (runs) and tests/launch/test_stop.py (launchers)."""

import os
import signal
import threading
import time

import psutil
import pytest

from mrl.config.config import RunConfig
from mrl.distributed.watchdog.graceful_stop import END_TIME, LIMITS, Stop, limits
from mrl.distributed.watchdog.signals import REQUEUE, Terminated
from mrl.errors import UserError

CLOCKS_APART_S = 1.0  # two clocks are read one after the other, on a busy machine
WAIT_S = 5


def make_stop():
    return Stop(RunConfig(), ends={}, keeps_time=True, say=lambda what: None)


def test_sigusr1_is_a_request_and_interrupts_nothing():
    stop, handler = make_stop(), signal.getsignal(signal.SIGUSR1)
    with stop.handle_signals():
        assert not stop.is_requested
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + WAIT_S
        while not stop.is_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.is_requested
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_half_of_the_time_beside_that_of_a_commit_is_for_sampling(monkeypatch):
    stop, now = make_stop(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop.reserve_s = 10.0
    assert not stop.is_time_short
    stop._receive(signal.SIGUSR1, directly=True)
    for later_s, is_short in ((34.9, False), (35.0, True)):  # 90 s / 2 - 10 s
        now[0] = 1000.0 + later_s
        assert stop.is_time_short == is_short
    now[0] = 1001.0
    stop._receive(signal.SIGTERM, directly=True)  # 25 s / 2 - 10 s from here
    for later_s, is_short in ((3.4, False), (3.5, True)):
        now[0] = 1000.0 + later_s
        assert stop.is_time_short == is_short


@pytest.mark.parametrize(
    ("number", "job_end_s", "allowed_s"),
    [
        (signal.SIGUSR1, None, 300.0),
        (signal.SIGUSR1, 215.0, 200.0),
        (signal.SIGUSR1, 30.0, 90.0),
        (signal.SIGTERM, None, 25.0),
    ],
)
def test_an_early_signal_leaves_the_time_of_a_step_and_a_commit_up_to_the_end_of_the_job(
    number, job_end_s, allowed_s, monkeypatch
):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    ends = {} if job_end_s is None else {LIMITS[1]: 1000.0 + job_end_s}
    stop = Stop(RunConfig(), ends=ends, keeps_time=False, say=lambda what: None)
    assert stop.time_left_s is None
    stop.step_s, stop.reserve_s = 200.0, 100.0
    stop._receive(number, directly=True)
    assert stop.time_left_s == allowed_s


def test_timeouts_that_a_commit_exceeds_are_named():
    stop = make_stop()
    assert stop.timeouts_below(25.0) == {}
    assert stop.timeouts_below(26.0) == {"run.term_timeout_s": 25.0}
    assert stop.timeouts_below(91.0) == {"run.term_timeout_s": 25.0, "run.stop_timeout_s": 90.0}


def test_sigterm_with_nothing_to_keep_ends_once_and_asks_to_be_queued_again():
    with pytest.raises(Terminated) as raised, make_stop().handle_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WAIT_S)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the same order by another way: the end is not interrupted
            time.sleep(0.1)
    assert raised.value.status == REQUEUE


def test_a_signal_that_was_blocked_at_the_start_is_heard():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread would not have it blocked
        with pytest.raises(Terminated), make_stop().handle_signals():
            time.sleep(WAIT_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_a_clock_that_is_set_while_the_run_goes_on_moves_no_limit(jump_s, monkeypatch):
    alive_s = time.time() - psutil.Process().create_time()
    now = time.time
    for left_s, told in ((3600, False), (-1, True)):
        ends = limits(RunConfig(max_time_s=alive_s + left_s), {END_TIME: str(now() + 7200)})
        stop = Stop(RunConfig(), ends=ends, keeps_time=True, say=print)
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        assert stop.is_requested == told
        monkeypatch.undo()


def test_limits_are_of_this_process_and_of_its_job():
    assert limits(RunConfig(), {}) == {}
    to_wall = time.time() - time.monotonic()
    ends = limits(RunConfig(max_time_s=60), {END_TIME: "1795250953"})
    assert ends[LIMITS[0]] + to_wall == pytest.approx(psutil.Process().create_time() + 60, abs=CLOCKS_APART_S)
    assert ends[LIMITS[1]] + to_wall == pytest.approx(1795250953, abs=CLOCKS_APART_S)
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME='Unknown': expected seconds since 1970, or unset it"):
        limits(RunConfig(), {END_TIME: "Unknown"})
