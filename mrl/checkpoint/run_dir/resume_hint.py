"""What is kept of a run that ended early, and the command that goes on from there: the end of its last message.

Owns the words. It imports no torch: a run may end before that is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import Config
from mrl.distributed.launch import environment
from mrl.distributed.relaunch_command import started_by


def to_go_on(config: Config, words: Sequence[str], at: str = "") -> str:
    """Sentences, the command last.

    Args:
        config: Of the run.
        words: Of the command line, after `mrl`.
        at: What the job was doing; "": nothing to tell.
    """
    steps = RunDir(Path(config.run.output_dir)).committed_steps()
    command, here = started_by(words), environment()
    if command is None:
        command = f"the same launcher with -m {shlex.join(['mrl', *words])}"
    elif here.launcher == "torchrun" and here.num_nodes > 1:
        command = f"the same command on each host, here {command}"
    if config.run.resume == "never" and steps:
        command += " run.resume=auto"
    kept = f"The last checkpoint is of step {steps[-1]}" if steps else "There is no checkpoint yet"
    happened = f"\nThis was at {at}." if at else ""
    return f"{happened}\n{kept}, in {config.run.output_dir}. {'Continue' if steps else 'Start again'} with: {command}"
