"""A process of `warm.python` has what one of the real Python has, and ends with its program, as that with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.source import ROOT
from tests.warm.client import read_by_imports

LIMIT_S = 60


def variables():
    """This process's, but those that imports read as the server had them: a test before may have changed some."""
    theirs = json.loads(Path(warm.python()).with_name("variables").read_text())
    del theirs["ROOT"]
    own = read_by_imports()
    return {key: value for key, value in os.environ.items() if key not in own} | theirs


def shown(python, folder, *flags):
    """What a process says of itself that was started in an odd way."""

    def oddly():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        os.umask(0o27)
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))

    with open(folder / "more", "wb") as more:
        done = subprocess.run(
            [python, *flags, "-m", "tests.warm.shown", "a b", "", "ü"], cwd=folder, input="what\nis said", text=True,
            env={**variables(), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "OWN": "1"},
            pass_fds=[more.fileno()], capture_output=True, preexec_fn=oddly, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        os.write(more.fileno(), b"x")  # it is open here still
    assert (done.returncode, done.stderr) == (7, ""), done.stderr
    found = json.loads(done.stdout)
    del found["streams"][0][
        3
    ]  # whether writing goes through at once: Pythons differ in what they say of standard input
    found["files"] = {number: file.partition(":[")[0] for number, file in found["files"].items()}
    return found


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["plain", "unbuffered"])
def test_it_has_what_the_real_one_has(flags, tmp_path):
    found, real = shown(warm.python(), tmp_path, *flags), shown(sys.executable, tmp_path, *flags)
    assert (found.pop("imported"), real.pop("imported")) == (True, False)
    assert found.pop("path")[: len(real["path"])] == real.pop("path")  # setuptools adds a folder of its own
    assert found == real
    assert found["parent"] == os.getpid() and found["blocked"] == [signal.SIGUSR1, signal.SIGTERM]


def test_what_it_does_not_fork_is_the_real_one(tmp_path):
    forked = "import sys; print('mrl.train' in sys.modules)"
    done = subprocess.run([warm.python(), "-c", forked], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "False\n"
    given = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [warm.python(), "-m", "tests.warm.shown"]
    done = subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 7 and not json.loads(done.stdout)["imported"]


def test_an_exception_is_told_as_the_real_one_tells_it():
    told = [
        subprocess.run(
            [python, "-m", "tests.warm.shown", "raise"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        for python in (warm.python(), sys.executable)
    ]
    assert [(each.returncode, each.stderr.splitlines()[-1]) for each in told] == [(1, "ArithmeticError: planted")] * 2


def waiting(folder):
    """A program whose process waits, and the number of the process."""
    words = [warm.python(), "-m", "tests.warm.shown", "wait", str(folder / "pid")]
    program = subprocess.Popen(words, cwd=ROOT, env=variables())
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < deadline and program.poll() is None
        time.sleep(0.01)
    return program, psutil.Process(int((folder / "pid").read_text()))


def test_it_is_told_of_signals_and_its_program_ends_as_it_does(tmp_path):
    program, _ = waiting(tmp_path)
    program.send_signal(signal.SIGUSR1)
    assert program.wait(LIMIT_S) == 75


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_that_ends_it_ends_its_program(number, tmp_path):
    program, process = waiting(tmp_path)
    process.send_signal(number)
    assert program.wait(LIMIT_S) == -number


def test_it_is_killed_with_its_program(tmp_path):
    program, process = waiting(tmp_path)
    program.kill()
    process.wait(LIMIT_S)
    assert program.wait(LIMIT_S) == -signal.SIGKILL
