"""A run goes on where nobody reads what it prints, and stops in order where its terminal is closed."""

import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.distributed.watchdog.signals import REQUEUE
from mrl.distributed.watchdog.stdio import ResilientStream
from tests import warm
from tests.e2e import runs
from tests.source import ROOT

LIMIT_S = 120
STEPS = 30
WORDS = (f"train.num_steps={STEPS}", "checkpoint.interval=1000", "observe.console=plain", "train.eval_interval=0")


def started(folder, **streams):
    words = [warm.python(), "-m", "mrl", "train", *runs.arguments(folder, WORDS)[1:]]
    return subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, **streams
    )


def last_step(folder):
    return RunDir(folder / "run").committed_steps()[-1]


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["plain", "unbuffered"])
def test_a_reader_that_has_enough_is_no_failure(flags):
    code = "from mrl.distributed.watchdog import stdio; stdio.tolerate_closed_pipes(); print('line\\n' * 100_000)"
    words = [sys.executable, *flags, "-c", code]
    writer = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "line\n"
    writer.stdout.close()
    assert writer.stderr.read() == "" and writer.wait() == 0
    writer.stderr.close()


@pytest.mark.slow
def test_a_reader_that_ends_does_not_end_the_run(tmp_path):
    run = started(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"training" not in run.stdout.readline():
        assert run.poll() is None, run.stderr.read()
    run.stdout.close()
    told = run.stderr.read()
    assert run.wait(LIMIT_S) == 0, told
    assert last_step(tmp_path) == STEPS and told == b""


def test_a_terminal_that_is_closed_stops_the_run_in_order(tmp_path):
    ours, theirs = pty.openpty()

    def in_the_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests have it ignored
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    own = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    run = started(tmp_path, preexec_fn=in_the_terminal, **own)
    os.close(theirs)
    told = b""
    while b"training" not in told:
        told += os.read(ours, 4096)
    os.close(ours)  # the kernel sends SIGHUP, and what is written from now on fails
    assert run.wait(LIMIT_S) == REQUEUE
    assert 1 <= last_step(tmp_path) < STEPS


def test_a_full_disk_is_told(tmp_path):
    """Only what nobody can read is let go."""
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError) as raised, open(os.devnull, "w") as like:
        stream = ResilientStream(full, like)
        stream.write("x")
        stream.flush()
    assert raised.value.errno == errno.ENOSPC
