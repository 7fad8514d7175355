"""Interface of a callback, and the calls of a run's callbacks.

A callback observes a run and may end it early. To add one, derive from `Callback` and pass it to `mrl.train`, or name
it in `observe.callbacks`. Imports no torch before a run starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.checkpoint.io.jsonl_log import read_rows
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config import user_code
from mrl.config.config import Config
from mrl.config.registry import find
from mrl.errors import UserError, shown
from mrl.observability.loggers.base import Opening


@dataclass(frozen=True)
class TrainResult:
    """Result of `mrl.train`, the same on every rank.

    Attributes:
        run_dir: Run folder.
        step: Number of steps done.
        metrics: Metrics of the last step and of its evaluation, by name; {} if the run was complete before.
        checkpoint: Folder of the newest checkpoint; None if there is none.
        stopped_by: Reason why the run ended before its last step, such as "callback Patience" or "SIGTERM"; "" if it
            did not.
    """

    run_dir: Path
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None
    stopped_by: str = ""

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: "step", "phase" and the metrics of each step; read from the run folder."""
        return read_rows(RunDir(self.run_dir).metrics)


class Callback:
    """Base class of callbacks; override the methods that you need.

    All methods are called on rank 0 only, between the phases of the loop, so a slow method delays all ranks. An
    exception ends the run with an error that names the callback. Loggers have written their lines before.
    """

    def on_train_begin(self, opening: Opening) -> None:
        """Called before the first step of this start, also of a resumed run.

        Args:
            opening: Config with all defaults, run folder, and the step from which the run resumes.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after each RL or supervised step, but not after steps of the warm start.

        Args:
            step: Number of steps done, from 1.
            metrics: Metrics of the step (`mrl/docs/metrics.md`), without those of the evaluation.

        Returns:
            True to end the run after this step, with a checkpoint.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after each evaluation, before `on_step_end` of its step.

        Args:
            step: Number of steps done; 0 is before the first.
            metrics: Metrics of the held-out prompts (`val/...`).

        Returns:
            True to end the run after this step, with a checkpoint.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete on disk.

        Args:
            step: Number of steps done by its weights.
            path: Folder of the checkpoint.
        """

    def on_train_end(self, result: TrainResult) -> None:
        """Called once at the end of the run, also of one that was stopped, but not after an error."""


class RunCallbacks:
    """Callbacks of a run, on rank 0; on other ranks the methods only follow rank 0's decisions.

    Attributes:
        stopped_by: Name of the callback that ended the run, the same on all ranks; "": none did.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self.stopped_by = ""
        self._any = bool(config.observe.callbacks)
        self._wants_stop = ""
        self._callbacks: list[Callback] = []
        if rank == 0:
            self._callbacks = [_make(entry.name, entry.kwargs) for entry in config.observe.callbacks]

    def ended_run(self) -> bool:
        """Returns whether a callback ended the run, the same on all ranks."""
        return bool(self.stopped_by)

    def begin(self, opening: Opening) -> None:
        """Collective over the job: calls `on_train_begin`."""
        self._on_rank_0("on_train_begin", opening)

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collective over the job: calls `on_step_end`, then agrees on the end of the run."""
        self._on_rank_0("on_step_end", step, metrics)
        self._agree()

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collective over the job: calls `on_evaluate`."""
        self._on_rank_0("on_evaluate", step, metrics)
        if step == 0:
            self._agree()

    def checkpoint_written(self, step: int, path: Path) -> None:
        """Collective over the job: calls `on_checkpoint`."""
        self._on_rank_0("on_checkpoint", step, path)

    def end(self, result: TrainResult) -> None:
        """Calls `on_train_end`; no collective, because the process groups no longer exist."""
        self._call("on_train_end", result)

    def _agree(self) -> None:
        if self._any and not self.stopped_by:
            from mrl.distributed.collectives import broadcast_from_rank_0

            self.stopped_by = broadcast_from_rank_0(self._wants_stop)

    def _on_rank_0(self, method: str, *args: Any) -> None:
        if self._any:
            from mrl.distributed.collectives import raise_on_all_ranks

            with raise_on_all_ranks():
                self._call(method, *args)

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks:
            name = type(callback).__name__
            try:
                returned = getattr(callback, method)(*args)
            except Exception as error:  # a user's callback may raise anything
                raise UserError(f"callback {name}: {method} raised {user_code.describe_error(error)}.") from error
            if returned is True and method in ("on_step_end", "on_evaluate"):
                self._wants_stop = self._wants_stop or f"callback {name}"
            elif returned not in (None, False):
                raise UserError(f"callback {name}: {method} returned {returned!r:.80}, expected True, False or None.")


def check_callbacks(config: Config) -> None:
    """Imports the callbacks of `observe.callbacks` and checks their kinds, without constructing them.

    Raises:
        UserError: One cannot be imported, is no `Callback`, or does not accept its kwargs.
    """
    for entry in config.observe.callbacks:
        _find(entry.name, entry.kwargs)


def _find(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Returns what a name of `observe.callbacks` refers to: a `Callback`, or something that makes one."""
    where = f"observe.callbacks: '{name}'"
    if not user_code.is_user_code(name):
        raise UserError(f"{where} is not a path to code: write {user_code.FORMS}.")
    found: Any = find("observe.callbacks", name, "")
    if isinstance(found, Callback):
        if kwargs:
            raise UserError(f"{where} is constructed already, so its kwargs have no effect. Remove them.")
        return found
    if not callable(found) or (isinstance(found, type) and not issubclass(found, Callback)):
        raise UserError(f"{where} is {shown(found)}, expected a subclass of mrl.Callback.")
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise UserError(f"{where} cannot be made with kwargs {dict(kwargs)}: {error}.") from error
    return found


def _make(name: str, kwargs: Mapping[str, Any]) -> Callback:
    found = _find(name, kwargs)
    if isinstance(found, Callback):
        return found
    try:
        made = found(**kwargs)
    except Exception as error:  # a user's constructor may raise anything
        raise UserError(f"observe.callbacks: '{name}' cannot be made: {user_code.describe_error(error)}.") from error
    if not isinstance(made, Callback):
        raise UserError(f"observe.callbacks: '{name}' returned {shown(made)}, expected an mrl.Callback.")
    return made
