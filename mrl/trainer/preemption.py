"""How far a run has come, so that it can stop between any two questions and go on as if it never had.

Owns the steps that can be abandoned: what a commit made now would hold, the points at which all ranks ask whether to
stop, and what happens then. Signals and clocks are `distributed/watchdog/graceful_stop.py`'s, the commit itself is
`checkpointing.py`'s.

A step that is abandoned before its update leaves the state of the step before; once the update has begun it is
finished. An evaluation that is abandoned after the update is made again when the run goes on, before the step's line is
logged. So a run that was stopped writes the same lines as one that was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mrl.distributed.watchdog.graceful_stop import LIMITS, Stop, Stopped
from mrl.errors import UserError
from mrl.observability.timers import Timers
from mrl.trainer.inflight_samples import KeptSamples
from mrl.trainer.training_state import Standing

MARGIN = 1.25
"""A step, or a commit, may take this many times as long as the longest of the last ones."""

RECENT = 10
"""Steps whose times are remembered."""


class Progress:
    """Where the loop stands, and whether it may go on.

    Args:
        timers: Of the job.
        snapshot: JSON-able state of all that the loop moves on.
        samples: In flight on this rank.
    """

    def __init__(
        self, timers: Timers, snapshot: Callable[[], dict[str, Any]], samples: Callable[[], KeptSamples] = KeptSamples
    ) -> None:
        self.stop: Stop | None = None
        self.standing: Standing | None = None
        self._commit_s = 0.0
        self._is_apart = False
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._timers = timers
        self._snapshot = snapshot
        self._samples = samples

    @contextmanager
    def stops_in_order(self, stop: Stop | None, commit: Callable[[Standing], None]) -> Iterator[None]:
        """Collective over the job: a request to stop ends the work inside at the next question; what stands is kept.

        Args:
            stop: Heard; None: nothing stops the work.
            commit: Collective over the job: writes a commit.
        """
        self.stop = stop
        self.took(commit_s=self._commit_s)
        try:
            yield
        except Stopped:
            self._stop_here(commit)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Collective over the job: a step, unless the ranks were told to stop or it would not fit in the time left."""
        if self.stop is not None:
            self.stop.ask(MARGIN * max(self._steps_s, default=0.0))
        with self._timers.step(step):
            yield
        self._steps_s.append(self._timers.metrics()["timing_s/step"])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Collective over the job: a phase of a step that may still be abandoned; at its end the ranks ask."""
        with self._timers.phase(name):
            yield
        if not self._is_apart:
            self.ask()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, only some ranks work, and the end of a phase is no question: not all could answer it."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def ask(self) -> None:
        """Collective over the job: goes on, unless the ranks were told to stop."""
        if self.stop is not None:
            self.stop.ask()

    def took(self, *, commit_s: float) -> None:
        """Notes how long the last commit took; the next one is given so long before a limit, and a margin."""
        self._commit_s = commit_s
        if self.stop is not None:
            self.stop.reserve_s = MARGIN * commit_s

    def writes_beside(self) -> None:
        """Notes that a commit is being written, until `took` says how long: a stop waits for it and writes its own."""
        if self.stop is not None:
            self.stop.reserve_s = 2 * MARGIN * self._commit_s

    def told_to_stop(self) -> bool:
        """Whether this rank was told to stop: work within a phase may end early, its result is not used.

        Never while only some ranks work: what they make is used, and the others do not ask.
        """
        return self.stop is not None and self.stop.told and not self._is_apart

    def ends_sampling(self) -> bool:
        """Whether the engine of this rank is to sample no more.

        Beside updates, where what it has is kept, not before the time for the whole step runs out.
        """
        return self.told_to_stop() or (self._is_apart and self.stop is not None and self.stop.is_short)

    def reached(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        unlogged: Mapping[str, float] | None = None,
        warm_start: Mapping[str, Any] | None = None,
    ) -> Standing:
        """Notes what a commit holds from now on, until the next note; see `Standing`."""
        state = {"step": step, **self._snapshot(), "unlogged": unlogged, "warm_start": warm_start}
        self.standing = Standing(state, metrics or unlogged or {}, self._samples())
        return self.standing

    def unlogged(self, step: int) -> dict[str, float] | None:
        """Metrics of `step` if the run was stopped between its update and its line in the log."""
        if self.standing is None or self.standing.state["step"] != step:
            return None
        metrics: dict[str, float] | None = self.standing.state["unlogged"]
        return metrics

    def _stop_here(self, commit: Callable[[Standing], None]) -> None:
        """Commits what stands, unless it is committed, and says so."""
        stop, standing = self.stop, self.standing
        if stop is None:
            raise RuntimeError("stopped by nobody")
        is_new = standing is not None and not standing.committed
        if stop.why in LIMITS and not self._steps_s and not is_new:
            error = UserError(
                f"{stop.why} is over before one step was done, and every start would end so. Raise the limit, or make "
                "steps shorter: train.batch_size, rollout.n, rollout.response_length."
            )
            error.everywhere = True
            raise error
        if standing is None:
            stop.say(" before there was anything to keep")
            return
        if is_new:
            commit(standing)
        warm = standing.state["warm_start"]
        where = f"step {standing.state['step']}" if warm is None else f"warm start step {warm['step']}"
        stop.say(f" after {where}, which {'is' if is_new else 'was already'} committed")
