"""A run that writes its checkpoints beside the training and is killed at a moment of the write goes on identically.

    python -m tests.e2e.async_kills --moments 20     # one JSON line; ends with 1 where a run went on otherwise

A moment is one tensor on its way into a file, or one change of the folder of checkpoints (a file opened to be written,
a rename), counted over all threads of the process. The process ends by SIGKILL.
"""

import argparse
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from mrl.distributed.local_ranks import fork_server_context
from tests.e2e import runs
from tests.ranks import PRELOAD

ASYNC = ["train.num_steps=4", "checkpoint.interval=2", "checkpoint.async_save=true", "train.eval_interval=2"]
CHANGES = ("open", "os.rename", "os.mkdir")
JOIN_S = 120


def killed_run(folder, kill_at, answer=None):
    """In a process of its own: a run that is killed at moment `kill_at`; 0: never, and the moments are counted."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    commits, moments, write_item = str(folder / "run" / "checkpoints"), [0], filesystem_async._write_item

    def moment():
        moments[0] += 1
        if moments[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event, args):
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and str(args[0]).startswith(commits) and not reads:
            moment()

    @functools.wraps(write_item)
    def written(*args, **kwargs):
        moment()
        return write_item(*args, **kwargs)

    filesystem_async._write_item = written
    sys.addaudithook(hear)
    try:
        runs._alone(str(folder), runs.arguments(folder, ASYNC), {})
    finally:
        if answer is not None:
            answer.send(moments[0])


def killed(folder, kill_at):
    """Whether the run ended by the kill."""
    process = fork_server_context(PRELOAD).Process(target=killed_run, args=(folder, kill_at))
    process.start()
    process.join(JOIN_S)
    return process.exitcode == -signal.SIGKILL


def count_moments(folder):
    """Of a whole run."""
    ours, theirs = fork_server_context(PRELOAD).Pipe()
    process = fork_server_context(PRELOAD).Process(target=killed_run, args=(folder, 0, theirs))
    process.start()
    count = ours.recv()
    process.join(JOIN_S)
    return count


def goes_on(folder, expected):
    """Whether the same command, after the kill, ends in the lines of a run that nobody killed, with whole commits."""
    found = runs.train_in_pool(folder, ASYNC, 1)
    left = [path.name for path in (folder / "run/checkpoints").iterdir() if path.name.startswith(".")]
    return found == expected and not left


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    wanted = parser.parse_args().moments
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        count = count_moments(folder / "whole")
        expected = runs.metrics(folder / "whole")
        found = []
        for index in range(wanted):
            at = folder / f"killed-{index}"
            moment = 1 + index * (count - 1) // max(1, wanted - 1)
            found.append({"moment": moment, "killed": killed(at, moment), "same": goes_on(at, expected)})
            shutil.rmtree(at)
    good = all(each["killed"] and each["same"] for each in found)
    sys.stdout.write(json.dumps({"moments_of_a_run": count, "good": good, "kills": found}) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
