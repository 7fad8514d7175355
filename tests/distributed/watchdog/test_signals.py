"""A signal at any moment of a process, and a second one after it: a status of README, one message, no traceback.

`MRL_SIGNAL_CASES=60 pytest tests/distributed/watchdog/test_signals.py` draws more moments than the suite does.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mrl.distributed.watchdog import signals
from mrl.distributed.watchdog.signals import INTERRUPTED, REQUEUE, SIGNALS, TERMINATED
from tests.e2e import runs
from tests.source import ROOT

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("MRL_SIGNAL_CASES", "4"))
FEW = 4
AT_ONCE = 2
"""As many processes as the machine has cores: their moments are not those of a starved one."""
TIMEOUT_S = 120
SECOND_S = 3.0
"""A second SIGTERM or SIGHUP counts from `stop.REPEAT_S` = 2 s on; earlier ones are the same order by another way."""
COMMANDS = {
    "train": dict.fromkeys(SIGNALS, REQUEUE) | {signal.SIGINT: INTERRUPTED},
    "plan": dict.fromkeys(SIGNALS, TERMINATED) | {signal.SIGINT: INTERRUPTED, signal.SIGUSR1: 0},
    "torchrun": dict.fromkeys(SIGNALS, REQUEUE) | {signal.SIGINT: INTERRUPTED},
}
TAKEN = ("train", "train", "plan") if CASES <= FEW else tuple(COMMANDS)
"""In turn."""


class Process:
    """A process of `mrl` that gets signals at moments which are counted from its start, s.

    It begins with them blocked, as under mrl's launchers: what comes before its first line is not lost.
    """

    def __init__(self, folder, command, moments=()):
        self.output, self.command, self.moments = folder / "output.txt", command, moments
        words = [command, *runs.arguments(folder, ["train.num_steps=1", "train.warm_start.num_steps=1"])[1:]]
        program = [sys.executable, "-m", "mrl"]
        if command == "plan":
            words += ["--world-size", "2"]
        elif command == "torchrun":
            program, words[0] = [str(ROOT / "launch" / "torchrun.sh")], "train"
        self.began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*program, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable,
                    "NPROC_PER_NODE": "2", "MASTER_PORT": str(runs.free_port()), "TMPDIR": str(folder),
                },
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
            )  # fmt: skip

    def poll(self):
        """Sends what is due; the status once it has ended."""
        passed = time.monotonic() - self.began
        for moment, number in self.moments:
            if moment <= passed and self.process.poll() is None:
                self.process.send_signal(number)
        self.moments = [each for each in self.moments if each[0] > passed]
        assert passed < TIMEOUT_S, self.output.read_text()
        return self.process.poll()

    def is_requested(self):
        lines = self.output.read_text().splitlines()
        return [line for line in lines if line.startswith(("mrl: ", "Traceback", "Exception", "Fatal"))]


def finish(processes):
    while None in [process.poll() for process in processes]:
        time.sleep(0.01)


def test_every_moment_ends_with_a_known_status_and_one_message_at_most(tmp_path):
    draw = random.Random(CASES)
    lives = {}
    for command in dict.fromkeys(TAKEN):
        (tmp_path / command).mkdir()
        process = Process(tmp_path / command, command)
        finish([process])
        assert process.poll() == 0, process.output.read_text()
        lives[command] = time.monotonic() - process.began
    cases = []
    for number in range(CASES):
        command = TAKEN[number % len(TAKEN)]
        first, second = draw.choice(SIGNALS), draw.choice([*SIGNALS, None])
        moment = draw.uniform(0, 1.1 * lives[command])
        moments = [(moment, first)]
        if second is not None:
            moments.append((moment + draw.uniform(0, SECOND_S), second))
        cases.append((command, moments))
    for start in range(0, CASES, AT_ONCE):
        running = []
        for number, (command, moments) in list(enumerate(cases))[start : start + AT_ONCE]:
            folder = tmp_path / f"case{number}"
            folder.mkdir()
            running.append((Process(folder, command, moments), moments))
        finish([process for process, _ in running])
        for process, moments in running:
            status, told = process.poll(), process.is_requested()
            allowed = {0, *(COMMANDS[process.command][number] for _, number in moments)}
            case = f"{process.command} {moments}: {status}\n{process.output.read_text()}"
            assert status in allowed, case
            assert not list(process.output.parent.glob("torchelastic_*")), case
            assert len(told) == (status != 0) and all(line.startswith("mrl: ") for line in told), case


def test_a_hint_that_cannot_be_made_does_not_hide_what_happened(monkeypatch):
    def broken():
        raise ValueError("no environment")

    monkeypatch.setattr(signals._State, "resume_hint", staticmethod(broken))
    assert signals._message(signal.SIGINT) == "mrl: interrupted.\n"
