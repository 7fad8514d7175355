"""RunContext: what `startup.py` opens before it builds the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrl.checkpoint.run_dir.checkpoint import CheckpointManager, ResumePoint
from mrl.distributed.groups import ProcessGroups
from mrl.observability.run_log import RunLog
from mrl.observability.timers import Timers


@dataclass(frozen=True)
class RunContext:
    """Process groups, device, log and folders of a run.

    Attributes:
        groups: Process groups and coordinates of this rank.
        device: Device of this rank.
        log: Log of the run.
        timers: Phase timers of this rank.
        on_forward: Function that the engine calls after each forward; it tells the watchdog that this rank progresses.
        checkpoints: Checkpoint folders of the run.
        resume_point: Checkpoint to resume from; None to start a new run.
    """

    groups: ProcessGroups
    device: torch.device
    log: RunLog
    timers: Timers
    on_forward: Callable[[], object]
    checkpoints: CheckpointManager
    resume_point: ResumePoint | None
