"""One job owns a run folder: of many that start at once one gets it, and only from a dead owner another one."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.checkpoint.run_dir import run_lock
from mrl.checkpoint.run_dir.run_lock import LockFiles, acquire_run_lock, current_owner
from mrl.errors import UserError
from tests.ranks import run_ranks

ELSEWHERE = {"space": "another kernel", "host": "node7"}
SHORT_S = 0.8
"""An owner on another host may be silent for so long; POLL_S is well below it."""
HEARD_S = 30
"""A thread that looks every POLL_S has looked by then, on any machine."""


def claim(folder, **changes):
    """Writes the file of an owner that ended, or is elsewhere, without a word."""
    claims = LockFiles(folder / "owner")
    last = claims.last()
    assert claims.acquire(last.number + 1 if last else 1, replace(current_owner(2, SHORT_S), **changes))
    return claims


def taken(folder, silent_s=5.0, keep_s=0.0, variables=()):
    """On each rank: the note, or the refusal; the folder is kept for so long, and then free."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables:
            patch.setenv(name, value)
        rank = dist.get_rank()
        try:
            with acquire_run_lock(folder, current_owner(dist.get_world_size(), silent_s), rank) as mine:
                mine.start_heartbeat(silent_s, lambda why: None)
                time.sleep(keep_s)
                return ["", *mine.notes][-1]
        except UserError as error:
            return str(error)


def test_a_folder_is_taken_freed_and_taken_again(tmp_path):
    for number in (1, 2):
        assert run_ranks(2, taken, tmp_path) == ["", ""]
        assert [path.name for path in (tmp_path / "owner").iterdir()] == [f"{number:08d}.free"]


def test_all_ranks_are_told_who_has_it_and_what_to_do(tmp_path):
    claim(tmp_path)
    refused, same = run_ranks(2, taken, tmp_path)
    assert refused == same
    assert f"run.output_dir '{tmp_path}' is in use: process {os.getpid()} on host " in refused
    assert f"stop it (`kill {os.getpid()}` on" in refused and "choose another run.output_dir" in refused


@pytest.fixture
def ended():
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_one_that_has_ended_is_told_and_followed_at_once(tmp_path, ended):
    claim(tmp_path, pid=ended, silent_s=500.0)
    note, same = run_ranks(2, taken, tmp_path)
    assert note.startswith(f"took the run folder over from process {ended} on host ") and note == same
    assert note.endswith(", which has ended")


def test_a_process_that_has_the_id_of_an_owner_is_not_the_owner(tmp_path):
    claim(tmp_path, born="1", silent_s=500.0)
    assert run_ranks(2, taken, tmp_path)[0].endswith("which has ended")


def test_an_owner_that_waits_to_be_asked_for_its_status_has_ended(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        claim(tmp_path, pid=zombie.pid, silent_s=500.0)
        assert run_ranks(2, taken, tmp_path)[0].endswith("which has ended")


def test_a_stopped_owner_lives(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(19)
        claim(tmp_path, pid=process.pid, born=run_lock._start_time(process.pid), silent_s=0.1)
        assert "is in use: process" in run_ranks(2, taken, tmp_path)[0]
        process.kill()


@contextmanager
def beating(claims, every_s):
    end = threading.Event()

    def beat():
        while not end.wait(every_s):
            claims.touch(claims.last().number)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    end.set()
    thread.join()


def test_an_owner_on_another_host_lives_as_long_as_its_file_is_touched(tmp_path):
    with beating(claim(tmp_path, **ELSEWHERE), SHORT_S / 4):
        assert "is in use: process" in run_ranks(2, taken, tmp_path)[0]
    began = time.monotonic()
    assert run_ranks(2, taken, tmp_path)[0].endswith("which gave no sign of life for 1 s")
    assert time.monotonic() - began >= SHORT_S


def test_clocks_of_hosts_may_differ(tmp_path):
    claims = claim(tmp_path, **ELSEWHERE)
    for day in (-1, 1):
        os.utime(claims._path(1), (time.time() + day * 86400,) * 2)
        if day == -1:
            with beating(claims, SHORT_S / 4):
                assert "is in use" in run_ranks(2, taken, tmp_path)[0]
    assert "no sign of life" in run_ranks(2, taken, tmp_path)[0]


def test_a_folder_that_becomes_free_while_its_owner_is_watched_is_taken(tmp_path):
    claims = claim(tmp_path, **ELSEWHERE, silent_s=60)
    threading.Timer(1.0, claims.free, [1]).start()
    assert run_ranks(2, taken, tmp_path) == ["", ""]


def test_a_job_that_slurm_has_queued_again_follows_its_earlier_life_at_once_and_no_other_step_of_the_job(tmp_path):
    again = [("SLURM_JOB_ID", "77"), ("SLURM_RESTART_COUNT", "2")]
    claim(tmp_path, **ELSEWHERE, silent_s=500.0, job="77", life=1)
    assert run_ranks(2, taken, tmp_path, variables=again)[0].endswith("this job before it was queued again")
    with beating(claim(tmp_path, **ELSEWHERE, job="77", life=2), SHORT_S / 4):
        assert "stop it (scancel 77)" in run_ranks(2, taken, tmp_path, variables=again)[0]


def test_an_owner_that_was_followed_is_told_and_may_not_commit(tmp_path):
    claims, heard = LockFiles(tmp_path / "owner"), []
    mine = run_lock.RunLock(claims, claims.acquire(1, current_owner(1, SHORT_S)), [])
    mine.start_heartbeat(SHORT_S, heard.append)
    mine.check()
    claim(tmp_path, **ELSEWHERE)
    with pytest.raises(UserError, match=r"no longer belongs to this job: process \d+ on host node7"):
        mine.check()
    deadline = time.monotonic() + HEARD_S
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(SHORT_S / 2)  # and it is told once
    assert len(heard) == 1
    mine.close()
    assert claims.last().owner.host == "node7"


def _race(folder, gate, results):
    claims = LockFiles(folder)
    gate.wait()
    last = claims.last()
    me = current_owner(1, 60)
    free = last is None or last.is_free or last.owner.is_alive() is False
    number = claims.acquire(last.number + 1 if last else 1, me) if free else 0
    results.put(number)
    gate.wait()  # the winner lives until all have looked
    if number and number % 2:
        claims.free(number)


@pytest.mark.slow
def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(1, 11):  # after an owner that freed it, and after one that only ended
        gate, results = context.Barrier(6), context.Queue()
        racers = [context.Process(target=_race, args=(tmp_path / "owner", gate, results)) for _ in range(6)]
        for each in racers:
            each.start()
        assert sorted(results.get(timeout=30) for _ in racers) == [0] * 5 + [number]
        for each in racers:
            each.join()
        assert len(os.listdir(tmp_path / "owner")) == 1


@pytest.mark.slow
def test_a_claim_that_is_followed_while_it_is_read_is_not_one_that_cannot_be_read(tmp_path):
    claims, ended = LockFiles(tmp_path / "owner"), threading.Event()

    def follow():
        for number in range(2, 200):
            claims.acquire(number, current_owner(1, 60))
        ended.set()

    claims.acquire(1, current_owner(1, 60))
    threading.Thread(target=follow).start()
    while not ended.is_set():
        assert claims.last().owner is not None


VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary() | st.dictionaries(st.sampled_from([*asdict(current_owner(1, 1.0)), "x"]), VALUES))
def test_what_is_in_a_file_of_an_owner_is_an_owner_or_nothing(tmp_path_factory, content):
    if isinstance(content, dict):
        content = json.dumps(asdict(current_owner(1, 1.0)) | content).encode()
    path = tmp_path_factory.getbasetemp() / "owner.json"
    path.write_bytes(content)
    found = run_lock._decode(path)
    assert found is None or (found.is_alive() in (True, False, None) and str(found))
