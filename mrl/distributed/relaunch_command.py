"""The line that starts this process's job again, as a shell reads it: what was typed, as far as a rank can see it.

Owns where that is looked for. A script of `launch/` says it in a variable; torchrun and mpirun are ancestors of their
ranks, with a command line that ends in the ranks' own words.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

import psutil

from mrl.distributed.launch import environment, variables

SAID = "MRL_STARTED_BY"
"""Set by launch/torchrun.sh and launch/mpirun.sh: variables, script and words."""


JOB = "SLURM_JOB_ID"
"""Inside a job the launchers' lines are of this job's hosts, and of no other's."""


def started_by(words: Sequence[str]) -> str | None:
    """The line; None: who started the ranks is not to be seen from here, as in a job of SLURM.

    Args:
        words: Of the command line, after `mrl`.
    """
    if environment().world_size == 1:
        own = _before(sys.orig_argv, words)
        return shlex.join([*(own if "-m" in own else ["mrl"]), *words])
    said = variables(SAID, JOB)
    if _before(_split(said.get(SAID, "")), words):
        return said[SAID].rstrip()
    if JOB in said:
        return None
    try:
        for ancestor in psutil.Process().parents():
            if launcher := _before(ancestor.cmdline(), words):
                return shlex.join([*launcher, *words])
    except psutil.Error:  # it has ended, or is another user's
        pass
    return None


def _before(line: Sequence[str], words: Sequence[str]) -> list[str]:
    """What stands before the words in a command line that ends in them; [] where it does not.

    A program that is a script of Python's, which a shell finds by its name, goes by that.
    """
    if list(line[-len(words) :]) != list(words):
        return []
    found = list(line[: -len(words)])
    name = found[1].rpartition("/")[2] if len(found) > 1 else ""
    return [name, *found[2:]] if name and shutil.which(name) == found[1] else found


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # no line of a shell's
        return []
