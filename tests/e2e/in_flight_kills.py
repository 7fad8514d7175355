"""Runs with samples in flight that are killed at random moments, again and again, and go on as if nobody had.

    python -m tests.e2e.in_flight_kills                  # twenty kills under torchrun; some minutes
    python -m tests.e2e.in_flight_kills --kills 5 --settings train.mode=async train.max_off_policy_steps=2

Two ranks train and one samples. Prints a JSON line, and ends with 1 where a killed run has other metrics or samples
than one that nobody killed, or ended before it was killed so often. All ranks end by SIGKILL, at a random moment of a
step.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mrl.distributed.local_ranks import fork_server_context, free_port
from tests.e2e import runs
from tests.ranks import PRELOAD

RANKS = 3
COMMON = ["rollout.num_ranks=1", "checkpoint.interval=1", "train.eval_interval=4"]
SETTINGS = ["train.mode=async", "train.max_off_policy_steps=2", "rollout.response_length=12", "rollout.max_num_seqs=6"]
MOMENT_S = 0.6
"""After a new line of the metrics; a step takes less."""


def _rank(folder, arguments, rank, port, variables):
    os.environ.update(
        variables,
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    with open(folder / "output.txt", "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(runs.REPOSITORY)
    sys.argv = ["mrl", *arguments]
    from mrl.__main__ import main

    sys.exit(main())


class Job:
    """The processes of a run that has begun."""

    def __init__(self, folder, settings, *, by_torchrun, variables=()):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if by_torchrun:
            self._process = runs.start(folder, settings, RANKS)
            self._processes = []
        else:
            arguments, port = runs.arguments(folder, settings), free_port()
            self._process = None
            self._processes = [
                fork_server_context(PRELOAD).Process(
                    target=_rank, args=(folder, arguments, rank, port, dict(variables))
                )
                for rank in range(RANKS)
            ]
            for process in self._processes:
                process.start()

    @property
    def num_lines(self):
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def runs(self):
        if self._process is not None:
            return self._process.poll() is None
        return any(process.is_alive() for process in self._processes)

    def kill(self):
        """SIGKILL to every process; whether the run was still going on."""
        was_running = self.runs
        pids = [process.pid for process in self._processes]
        if self._process is not None and psutil.pid_exists(self._process.pid):
            family = psutil.Process(self._process.pid)
            pids = [family.pid, *(child.pid for child in family.children(recursive=True))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        return was_running

    def wait(self):
        """Exit statuses."""
        if self._process is not None:
            return [self._process.wait(runs.TIMEOUT_S)]
        for process in self._processes:
            process.join(runs.TIMEOUT_S)
        return [process.exitcode for process in self._processes]


def killed_after(job, num_lines, wait_s):
    """Kills the job so long after its metrics have so many lines; whether it was still going on."""
    deadline = time.monotonic() + runs.TIMEOUT_S
    while job.runs and job.num_lines < num_lines and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(wait_s)
    return job.kill()


def result(folder):
    return [(folder / "run" / name).read_text().splitlines() for name in ("metrics.jsonl", "samples.jsonl")]


def compare(settings, folder, *, kills, seed, by_torchrun):
    """A run that nobody kills and one that is killed so often."""
    steps, draw = kills + 4, random.Random(seed)
    settings = [*COMMON, *settings, f"train.num_steps={steps}"]
    whole = Job(folder / "whole", settings, by_torchrun=by_torchrun)
    statuses = whole.wait()
    assert not any(statuses), (folder / "whole" / "output.txt").read_text()[-3000:]
    moments = []
    while len(moments) < kills:
        job = Job(folder / "killed", settings, by_torchrun=by_torchrun)
        moments.append(draw.random() * MOMENT_S)
        if not killed_after(job, 5 + len(moments), moments[-1]):
            break
    last = Job(folder / "killed", settings, by_torchrun=by_torchrun).wait()
    assert not any(last), (folder / "killed" / "output.txt").read_text()[-3000:]
    expected, found = result(folder / "whole"), result(folder / "killed")
    same = dict(zip(("metrics", "samples"), (a == b for a, b in zip(found, expected, strict=True)), strict=True))
    return {
        "kills": len(moments),
        "s_after_a_line": [round(moment, 3) for moment in moments],
        "lines": len(expected[0]),
        "same": same,
        "holds": len(moments) == kills and all(same.values()),
    }


def main():
    """Prints what was found; 0 where all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        line = compare(given.settings, Path(name), kills=given.kills, seed=given.seed, by_torchrun=True)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0 if line["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
