"""The end of the last message of a run that ended early: the newest checkpoint and the command that resumes it.

It imports no torch, since a run may end before torch is imported.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import Config
from mrl.distributed.launch import get_launcher_env
from mrl.distributed.relaunch_command import started_by


def resume_hint(config: Config, argv: Sequence[str], at: str = "") -> str:
    """Returns the hint as sentences, the command last.

    Args:
        config: Config of the run.
        argv: Words of the command line after `mrl`.
        at: Current activity of the job; "": unknown.
    """
    steps = RunDir(Path(config.run.output_dir)).committed_steps()
    command, here = started_by(argv), get_launcher_env()
    if command is None:
        command = f"the same launcher with -m {shlex.join(['mrl', *argv])}"
    elif here.launcher == "torchrun" and here.num_nodes > 1:
        command = f"the same command on each host, here {command}"
    if config.run.resume == "never" and steps:
        command += " run.resume=auto"
    kept = f"The last checkpoint is of step {steps[-1]}" if steps else "There is no checkpoint yet"
    happened = f"\nThis was at {at}." if at else ""
    return f"{happened}\n{kept}, in {config.run.output_dir}. {'Continue' if steps else 'Start again'} with: {command}"
