"""The interface of a logger. A logger is a file in this folder that defines `LOGGER`, a function of an `Opening`.

Owns `Logger` and `Opening`. `LOGGER` returns the logger, or None where the config does not want it, and raises
UserError where it is wanted and cannot work. Loggers exist on rank 0 only. A logger that needs a package which mrl does
not install defines `check(config)` too: it raises UserError where the logger is wanted and the package is missing, and
is asked before a run begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import Config

Phase = Literal["warm_start", "train", "val"]
"""warm_start counts its own steps; train and val share the steps of reinforcement learning."""


@dataclass(frozen=True)
class Opening:
    """What a logger is made from.

    Attributes:
        config: Resolved.
        run: The run folder, started.
        resume_step: Reinforcement learning steps that were done before; None: a run from nothing.
    """

    config: Config
    run: RunDir
    resume_step: int | None


def installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name (such as the one that wandb writes) is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class Logger(ABC):
    """One place that metrics go to."""

    @abstractmethod
    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Values of a step. A step may come several times, with further names."""

    def warm_start_resumed(self, step: int) -> None:  # noqa: B027 - optional
        """The warm start goes on after its step `step`."""

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Sample generations, see `run_log.sample_rows`."""

    def note(self, text: str) -> None:  # noqa: B027 - optional
        """Something that happened, in words."""

    def phase(self, where: str) -> None:  # noqa: B027 - optional
        """What runs now, `Timers.where`."""

    def sync(self) -> None:  # noqa: B027 - optional
        """A commit is about to be made: what was recorded so far has to be on the disk."""

    def close(self) -> None:  # noqa: B027 - optional
        """Everything is written; called once."""
