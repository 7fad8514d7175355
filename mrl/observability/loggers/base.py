"""Interface of a logger. To add one, put a module into this folder that defines `LOGGER`, a function of `Opening`.

`LOGGER` returns a `Logger`, or None where the config does not enable it, and raises UserError where it is enabled but
cannot work. `observe.loggers` enables it: then `Opening.kwargs` is not None. Loggers exist on rank 0 only. A logger
that needs a package which mrl does not install also defines `check(config)`, which raises UserError if the logger is
enabled and the package is missing; it is called before a run starts.
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
"""Phase of a run. "warm_start" counts its own steps; "train" and "val" share the RL steps."""


@dataclass(frozen=True)
class Opening:
    """Arguments of a logger's constructor.

    Attributes:
        config: Configuration of the run, with all defaults filled in.
        run: Run folder, already created.
        resume_step: RL steps in the checkpoint that the run resumes from; None for a new run.
        kwargs: `kwargs` of the logger's entry in `observe.loggers`; None: it has no entry.
    """

    config: Config
    run: RunDir
    resume_step: int | None
    kwargs: Mapping[str, Any] | None = None


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; a plain folder of that name (wandb writes one) does not count."""
    found = find_spec(package)
    return found is not None and found.origin is not None


class Logger(ABC):
    """One destination of metrics, samples and notes; only `record` must be defined.

    Attributes:
        opening: Argument of the constructor; None for an instance that a script made itself.
    """

    opening: Opening | None = None

    def __init__(self, opening: Opening | None = None) -> None:
        self.opening = opening

    @abstractmethod
    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step. Called several times for a step if metrics become available later.

        Args:
            phase: Phase that the step belongs to.
            step: Step of that phase, counted from 1; 0 is before the first step.
            metrics: Metric values by name (`mrl/docs/metrics.md`).
        """

    def warm_start_resumed(self, step: int) -> None:  # noqa: B027 - optional
        """Discards warm-start metrics after `step`, from which the warm start resumes."""

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Writes sampled responses.

        Args:
            phase: "train" or "val".
            step: RL step of the samples.
            rows: Samples as returned by `run_log.sample_rows`.
        """

    def note(self, text: str) -> None:  # noqa: B027 - optional
        """Writes a one-line message about an event, such as a resume."""

    def phase(self, where: str) -> None:  # noqa: B027 - optional
        """Shows the current activity, the text of `CurrentPhase.describe`."""

    def progress(self, text: str) -> None:  # noqa: B027 - optional
        """Shows the progress inside a long phase, at most once a second: the phase, prompts done, tokens per second."""

    def sync(self) -> None:  # noqa: B027 - optional
        """Flushes everything recorded so far to disk; called before a checkpoint is committed."""

    def close(self) -> None:  # noqa: B027 - optional
        """Flushes and releases all resources; called once."""
