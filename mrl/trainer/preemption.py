"""Graceful stop of a run: all ranks check for stop requests at the same points, and the last state is checkpointed.

A step that is abandoned before its update leaves the state of the previous step; a started update is finished. An
evaluation that is abandoned is repeated after the resume, before the step is logged, so a stopped and resumed run logs
the same lines as an uninterrupted one. Signals and time limits are in `distributed/watchdog/graceful_stop.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mrl.distributed.watchdog.graceful_stop import LIMITS, Stop, StopRequested
from mrl.errors import UserError
from mrl.observability.timers import Timers
from mrl.trainer.inflight_samples import BufferSnapshot
from mrl.trainer.training_state import SavedState

MARGIN = 1.25
"""Safety factor: a step or checkpoint is assumed to take up to this many times the longest recent one."""

RECENT = 10
"""Number of recent steps whose times are stored."""


class RunProgress:
    """Position in the run, and checks for stop requests.

    Args:
        timers: Phase timers of this rank.
        snapshot: Function that returns the current training state, JSON-serializable.
        samples: Function that returns this rank's samples in the rollout buffer.
    """

    def __init__(
        self,
        timers: Timers,
        snapshot: Callable[[], dict[str, Any]],
        samples: Callable[[], BufferSnapshot] = BufferSnapshot,
    ) -> None:
        self.stop: Stop | None = None
        self.last_state: SavedState | None = None
        self._commit_s = 0.0
        self._is_apart = False
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._timers = timers
        self._snapshot = snapshot
        self._samples = samples

    @contextmanager
    def stop_gracefully(self, stop: Stop | None, commit: Callable[[SavedState], None]) -> Iterator[None]:
        """Collective over the job: ends the body at its next check after a stop request and writes a checkpoint.

        Args:
            stop: Source of stop requests; None: no checks.
            commit: Collective function that writes a checkpoint.
        """
        self.stop = stop
        self.record_save_time(save_s=self._commit_s)
        try:
            yield
        except StopRequested:
            self._stop_here(commit)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Collective over the job: times a step, or raises `StopRequested` after a stop request or if time is short."""
        if self.stop is not None:
            self.stop.ask(MARGIN * max(self._steps_s, default=0.0))
        with self._timers.step(step):
            yield
        self._steps_s.append(self._timers.metrics()["timing_s/step"])
        if self.stop is not None:
            self.stop.step_s = MARGIN * max(self._steps_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Collective over the job: times a phase before the update; checks for a stop request at its end."""
        with self._timers.phase(name):
            yield
        if not self._is_apart:
            self.check_stop()

    @contextmanager
    def without_stop_checks(self) -> Iterator[None]:
        """Disables the checks while ranks run different work, because a check is collective over all ranks."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def check_stop(self) -> None:
        """Collective over the job: raises `StopRequested` on all ranks if a stop was requested on any."""
        if self.stop is not None:
            self.stop.ask()

    def record_save_time(self, *, save_s: float) -> None:
        """Records the duration of the last checkpoint; so much time, with a margin, is reserved before a time limit."""
        self._commit_s = save_s
        if self.stop is not None:
            self.stop.reserve_s = MARGIN * save_s

    def short_timeouts(self) -> str:
        """Returns a warning about stop timeouts that are shorter than the last checkpoint took; "" if none is."""
        short = {} if self.stop is None else self.stop.timeouts_below(self._commit_s)
        if not short:
            return ""
        keys = " and ".join(f"{key}={timeout:g}" for key, timeout in short.items())
        return (
            f"a checkpoint takes {self._commit_s:.0f} s, longer than {keys}: a stop by signal may lose the steps since "
            "the last checkpoint. Raise it, let the scheduler send its signal earlier, or lower checkpoint.interval."
        )

    def has_time_to_export(self) -> bool:
        """Returns whether a checkpoint with its export is known to fit before the deadlines that this rank knows."""
        left_s = None if self.stop is None else self.stop.time_left_s
        return left_s is None or 0 < MARGIN * self._commit_s <= left_s

    def reserve_for_async_save(self) -> None:
        """Doubles the reserved time until `record_save_time`: a stop awaits the background save, then saves."""
        if self.stop is not None:
            self.stop.reserve_s = 2 * MARGIN * self._commit_s

    def abort_requested(self) -> bool:
        """Returns whether a stop was requested, so that work within a phase may end early with an unused result.

        False while ranks run different work (`without_stop_checks`), because that work's result is used.
        """
        return self.stop is not None and self.stop.is_requested and not self._is_apart

    def must_stop_sampling(self) -> bool:
        """Returns whether the engine must stop sampling.

        While updates run concurrently, partial rollouts are kept, and sampling stops only when the time runs short.
        """
        return self.abort_requested() or (self._is_apart and self.stop is not None and self.stop.is_time_short)

    def record_state(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        unlogged: Mapping[str, float] | None = None,
        warm_start: Mapping[str, Any] | None = None,
    ) -> SavedState:
        """Records the state for the next checkpoint; see `SavedState`."""
        state = {"step": step, **self._snapshot(), "unlogged": unlogged, "warm_start": warm_start}
        self.last_state = SavedState(state, metrics or unlogged or {}, self._samples())
        return self.last_state

    def unlogged(self, step: int) -> dict[str, float] | None:
        """Returns the metrics of `step` if the run stopped after its update and before it was logged, else None."""
        if self.last_state is None or self.last_state.state["step"] != step:
            return None
        metrics: dict[str, float] | None = self.last_state.state["unlogged"]
        return metrics

    def _stop_here(self, commit: Callable[[SavedState], None]) -> None:
        """Writes a checkpoint of the recorded state unless there is one, and logs it."""
        stop, standing = self.stop, self.last_state
        if stop is None:
            raise RuntimeError("Stopped was raised without a source of stop requests")
        is_new = standing is not None and not standing.is_saved
        if stop.why in LIMITS and not self._steps_s and not is_new:
            error = UserError(
                f"{stop.why} was reached before one step was done, and a restart would end the same way. Raise the "
                "limit, or make steps shorter with train.batch_size, rollout.n or rollout.response_length."
            )
            error.on_all_ranks = True
            raise error
        if standing is None:
            stop.print_reason(" before there was anything to save")
            return
        if is_new:
            commit(standing)
        warm = standing.state["warm_start"]
        where = f"step {standing.state['step']}" if warm is None else f"warm start step {warm['step']}"
        stop.print_reason(f" after {where}; its checkpoint {'was written' if is_new else 'existed already'}")
