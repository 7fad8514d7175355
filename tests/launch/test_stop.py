"""A run that is told to stop and cannot, and one that mpirun starts: status 75, one message, nobody left."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mrl.distributed.watchdog.graceful_stop import REPEAT_S
from tests import warm
from tests.e2e import runs, told
from tests.source import ROOT

pytestmark = pytest.mark.slow

TIMEOUT_S = 240
STEPS = (*told.OWN, "train.num_steps=3", "checkpoint.interval=1", "reward.time_limit_s=300")
HANGS = "0 hang 3 SIGUSR1"  # two updates of the first step, then the second step's
HELD = "0 score 20 SIGCONT"  # of the second step: 16 samples of each are this rank's
THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
"""A library's threads in the launcher: the kernel gives a signal to any that has it not blocked."""
MPI = {
    "MPIRUN_ARGS": "--oversubscribe", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip


class Run:
    """A run of the first words, its output and its processes."""

    def __init__(self, folder, words, tell, *overrides, **variables):
        self.folder = folder
        arguments = runs.arguments(folder, [*STEPS, *overrides])
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), told.TELL: tell,
            told.MARK: str(folder / "told"),
            **variables,
        }  # fmt: skip
        with open(folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                [*words, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.tree = []

    def wait_until_told(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.folder / "told").exists():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()
            time.sleep(0.1)
        self.tree = [*psutil.Process(self.process.pid).children(recursive=True), *warm.processes()]

    def output(self):
        return Path(self.folder / "output.txt").read_text()

    def end(self):
        """Status and the message; no process is left."""
        status = self.process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(self.tree, timeout=30)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        assert self.output().count("mrl: ") == 1, self.output()
        return status, self.output().partition("mrl: ")[2].splitlines()[0]


@pytest.fixture
def without_threads(tmp_path):
    """What the launchers of THREADS start ranks by: those are forked."""
    program = tmp_path / "rank"
    unset = " ".join(f"-u {name}" for name in THREADS if name != "OMP_NUM_THREADS")
    program.write_text(f'#!/bin/sh\nexec env {unset} OMP_NUM_THREADS=1 "{warm.python()}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_what_does_not_end_in_time_is_ended(tmp_path):
    run = Run(tmp_path, [warm.python(), "-m", "mrl"], "0 hang 1 SIGUSR1", "run.stop_timeout_s=1")
    run.wait_until_told()
    said = "stop requested by SIGUSR1, not finished within run.stop_timeout_s=1; ended without a new checkpoint."
    status, message = run.end()
    assert status == 75 and message.startswith(said) and "Raise run.stop_timeout_s" in message
    assert "The last checkpoint is of step 0, in " in run.output()


def test_sigterm_twice_under_torchrun_leaves_nobody(without_threads, tmp_path):
    variables = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(runs.free_port()), "PYTHON_EXEC": without_threads, **THREADS}
    run = Run(tmp_path, [str(ROOT / "launch" / "torchrun.sh")], HANGS, **variables)
    run.wait_until_told()
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(1.5 * REPEAT_S)
    said = "stop requested by SIGTERM, then requested again; ended without a new checkpoint."
    assert run.end() == (75, said)


def test_sigusr1_to_torchrun_ends_in_a_checkpoint(without_threads, tmp_path):
    port, script = str(runs.free_port()), str(ROOT / "launch" / "torchrun.sh")
    variables = {"NPROC_PER_NODE": "2", "MASTER_PORT": port, "PYTHON_EXEC": without_threads, **THREADS}
    more = ("checkpoint.interval=0", "observe.report=true")
    run = Run(tmp_path, [script], HELD, *more, **variables)
    run.wait_until_told()
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == (75, "stopped by SIGUSR1 after step 1; its checkpoint was written.")
    typed = [f"PYTHON={sys.executable}", "NPROC_PER_NODE=2", f"MASTER_PORT={port}", script]
    words = runs.arguments(tmp_path, [*STEPS, *more])
    assert shlex.split(run.output().partition("Continue with: ")[2].splitlines()[0]) == [*typed, *words]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.mpi
def test_sigterm_to_mpirun_ends_in_a_checkpoint(tmp_path):
    variables = {"NPROC": "2", "PYTHON": warm.python(), **MPI}
    run = Run(tmp_path, [str(ROOT / "launch" / "mpirun.sh")], HELD, "checkpoint.interval=0", **variables)
    run.wait_until_told()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (75, "stopped by SIGUSR1 after step 1; its checkpoint was written.")
