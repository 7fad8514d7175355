"""A task, a reward and an algorithm that send their own run a signal, at the place that MRL_TEST_TELL names.

MRL_TEST_TELL="RANK PLACE COUNT SIGNAL": at the COUNTth time that this rank comes to PLACE
    draw        a training prompt is drawn (the warm start draws its own), those that are looked at first left out
    loss        the algorithm's loss, within the update
    score       a training sample is scored; the worker sleeps over it
    held_out    a held-out sample is scored, after COUNT training samples
    hang        as `loss`, which then sleeps
The file of MRL_TEST_MARK is there then. They compute what they compute without it. SIGCONT changes nothing: the place
is only held. A job that SLURM has queued again is left alone.

The reward's worker imports this file: what needs torch is in `told_run.py`.
"""

import os
import signal
import time
from pathlib import Path

import psutil

TELL, MARK = "MRL_TEST_TELL", "MRL_TEST_MARK"
LONG_S = 600
OWN = (
    "data.task=tests.e2e.told_run:Sums", "algorithm.name=tests.e2e.told_run:Policy", "observe.console=off",
    "reward.functions=[{name: 'tests.e2e.told:reward'}]",
)  # fmt: skip
_counts = {}


def reset(tell):
    """What a process that was used before needs."""
    os.environ[TELL] = tell
    _counts.clear()


def tells(place, number, process):
    """Sends the signal, once, if this is the place and the time."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return False
    rank, there, count, name = os.environ.get(TELL, "").split() or ("", "", "0", "")
    own = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    if place != there or rank != own or number < int(count) or "told" in _counts:
        return False
    _counts["told"] = 1
    os.kill(process, getattr(signal, name))
    if mark := os.environ.get(MARK):
        Path(mark).touch()
    return True


def number(place):
    _counts[place] = _counts.get(place, 0) + 1
    return _counts[place]


def reward(*, prompt, response, answer, extra):
    """Runs in a worker: its parent is its keeper, whose parent is the rank."""
    rank = psutil.Process().parents()[1].pid
    if "held_out" in extra:
        tells("held_out", _counts.get("sample", 0), rank)
    elif tells("score", number("sample"), rank):
        time.sleep(LONG_S)
    return len(set(response) & set(answer)) - 0.1 * len(response)
