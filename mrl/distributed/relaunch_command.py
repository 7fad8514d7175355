"""Shell command that starts this process's job again, reconstructed from what a rank can see.

A script of `launch/` sets it as a variable; torchrun and mpirun are ancestors of their ranks, and their command lines
end with the ranks' arguments.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

import psutil

from mrl.distributed.launch import get_env, get_launcher_env

STARTED_BY = "MRL_STARTED_BY"
"""Variable set by launch/torchrun.sh and launch/mpirun.sh: environment, script and arguments of the call."""


SLURM_JOB = "SLURM_JOB_ID"
"""Variable that SLURM sets; within a job the launcher's command line is only valid on that job's hosts."""


def started_by(words: Sequence[str]) -> str | None:
    """Returns the shell command whose last arguments, after `mrl`, are `words`; None if unknown, as in a SLURM job."""
    if get_launcher_env().world_size == 1:
        own = _without_suffix(sys.orig_argv, words)
        return shlex.join([*(own if "-m" in own else ["mrl"]), *words])
    values = get_env(STARTED_BY, SLURM_JOB)
    if _without_suffix(_split(values.get(STARTED_BY, "")), words):
        return values[STARTED_BY].rstrip()
    if SLURM_JOB in values:
        return None
    try:
        for ancestor in psutil.Process().parents():
            if launcher := _without_suffix(ancestor.cmdline(), words):
                return shlex.join([*launcher, *words])
    except psutil.Error:  # it has ended, or is another user's
        pass
    return None


def _without_suffix(line: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns the command line without its last `words`; [] if it does not end with them.

    A Python script that the shell finds on the PATH is named by its file name instead of by "python PATH".
    """
    if list(line[-len(words) :]) != list(words):
        return []
    found = list(line[: -len(words)])
    name = found[1].rpartition("/")[2] if len(found) > 1 else ""
    return [name, *found[2:]] if name and shutil.which(name) == found[1] else found


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # not valid shell syntax
        return []
