"""Two starts on one folder: one runs, the other says who does; after kill -9 of the first the next one goes on."""

import contextlib
import io
import os
import signal
import time

import psutil
import pytest

from tests.e2e import runs
from tests.e2e.told import OWN, TELL, reset
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = [*OWN, "train.num_steps=4", "checkpoint.interval=1"]


def start(folder, ports):
    """On a rank: the status of a start, and what it said."""
    said = io.StringIO()
    reset("")
    with contextlib.redirect_stderr(said):
        status = runs.in_rank(runs.arguments(folder, STEPS), ports)
    return status, "".join(said.getvalue().partition("mrl: ")[1:])  # without warnings of the first import


def two_ranks(folder):
    return run_ranks(2, start, str(folder), [runs.free_port(), runs.free_port()])


def test_a_second_start_says_who_has_the_folder_and_follows_when_that_one_is_killed(tmp_path):
    folder = tmp_path
    first = runs.fork(folder, STEPS, **{TELL: "0 loss 5 SIGSTOP"})  # in its third step, of which nothing is kept
    deadline = time.monotonic() + runs.TIMEOUT_S
    while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline and first.is_alive(), (folder / "output.txt").read_text()
        time.sleep(0.02)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "run").iterdir() if path.is_file()}
    (status, said), (other, silent) = two_ranks(folder)
    assert (status, other, silent) == (2, 2, "")
    assert f"'{folder}/run' is in use: process {first.pid} on host" in said and said.count("mrl: error") == 1
    assert before == {path.name: path.stat().st_mtime_ns for path in (folder / "run").iterdir() if path.is_file()}
    os.killpg(first.pid, signal.SIGKILL)
    first.join()
    assert two_ranks(folder)[0] == (0, "")
    rows = [(row["phase"], row["step"]) for row in runs.metrics(folder)]
    assert rows == [("warm_start", step) for step in (1, 2)] + [("train", step) for step in range(5)]
    notes = (folder / "run" / "notes.jsonl").read_text()
    assert f"took the run folder over from process {first.pid} on host" in notes and "which has ended" in notes
