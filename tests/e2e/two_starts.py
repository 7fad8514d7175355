"""Two starts on one run folder, at random offsets, and kill -9 of the one that has it; one and two ranks.

    python -m tests.e2e.two_starts --rounds 20 --seed 0

In each round one runs and the other says who holds the folder; once the owner is killed the next start goes on, and the
lines of metrics.jsonl are those of a run that nobody disturbed. One process imports everything and forks the starts.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.e2e import runs

STEPS = ["train.num_steps=4", "checkpoint.interval=2", "observe.console=off"]
LIMIT_S = 300


class Start:
    """The ranks of one start; they lead a process group of their own."""

    def __init__(self, folder, ranks, name):
        self.output = Path(folder) / f"{name}.txt"
        port = runs.free_port()
        words = runs.arguments(folder, STEPS)
        self.pids = [_fork(words, rank, ranks, port, self.output) for rank in range(ranks)]
        self.statuses = {}

    def poll(self):
        """Status of rank 0 once all have ended."""
        for pid in self.pids:
            if pid not in self.statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return self.statuses[self.pids[0]] if len(self.statuses) == len(self.pids) else None

    def kill(self):
        for pid in self.pids:
            if pid not in self.statuses:
                os.kill(pid, signal.SIGKILL)
        return wait([self])[0]


def _fork(words, rank, ranks, port, output):
    pid = os.fork()
    if pid:
        return pid
    try:
        threading.main_thread()._set_native_id()  # Python 3.11 leaves it the parent's
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        if ranks > 1:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        from mrl.commands.cli import main

        os._exit(main(words))
    except BaseException:  # noqa: BLE001 -- shown as the start's own failure
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def wait(starts, until=lambda statuses: all(status is not None for status in statuses)):
    deadline = time.monotonic() + LIMIT_S
    while not until(statuses := [start.poll() for start in starts]):
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.02)
    return statuses


def one_round(folder, ranks, offset_s, kill_s, whole):
    """What happened, in words; raises AssertionError."""
    first = Start(folder, ranks, "first")
    time.sleep(offset_s)
    second = Start(folder, ranks, "second")
    both = [first, second]
    wait(both, lambda statuses: 2 in statuses or None not in statuses)
    statuses = [start.poll() for start in both]
    held = [start for start in both if start.poll() == 2]
    if held:
        (refused,) = held
        (owner,) = [start for start in both if start is not refused]
        said = refused.output.read_text()
        assert "Traceback" not in said and said.count("mrl: error") == 1, said
        assert f"is in use: process {owner.pids[0]} on host" in said, said
    else:
        assert statuses == [0, 0], [start.output.read_text() for start in both]  # one came after the other
        owner = second
    time.sleep(kill_s)
    is_killed = owner.poll() is None and owner.kill() == -signal.SIGKILL
    third = Start(folder, ranks, "third")
    assert wait([third]) == [0], third.output.read_text()
    assert runs.metrics(folder) == whole
    assert not list((Path(folder) / "run" / "checkpoints").glob(".*"))
    return f"{'one refused' if held else 'one after the other'}, {'killed' if is_killed else 'ended by itself'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import mrl.train  # noqa: F401 -- before the forks

    draw, whole = random.Random(given.seed), {}
    for ranks in (1, 2):
        folder = tempfile.mkdtemp()
        began = time.monotonic()
        assert wait([Start(folder, ranks, "whole")]) == [0], (Path(folder) / "whole.txt").read_text()
        whole[ranks] = time.monotonic() - began, runs.metrics(folder)
    for number in range(given.rounds):
        ranks = 1 + number % 2
        seconds, rows = whole[ranks]
        offset_s, kill_s = draw.random() * seconds, draw.random() * seconds / 2
        with tempfile.TemporaryDirectory() as folder:
            what = one_round(folder, ranks, offset_s, kill_s, rows)
        print(f"{number}: {ranks} rank(s), second after {offset_s:.2f} s: {what}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
