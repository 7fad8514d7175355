"""Wall-clock timers of the phases of a step, and the name of the current phase for error messages and the watchdog.

Every rank has its own `Timers`; only those of rank 0 are logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from mrl.observability.memory_peaks import PeakMemory


class CurrentPhase:
    """Step and phase that this rank is in; the watchdog and error messages name them.

    `Timers` sets them. The object exists before the rest of the run, so that errors of the startup name a place, too.

    Attributes:
        step: Current step; None before the first one.
        stack: Names of the current phases, outermost first.
        failed: Path of the innermost phase that an error left; None: no error since the last phase started.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.stack: list[str] = []
        self.failed: str | None = None

    @property
    def has_begun(self) -> bool:
        """True if a step was started."""
        return self.step is not None

    def fail(self, path: str) -> None:
        """Records that an error left the phase; the innermost phase of an error counts."""
        if self.failed is None:
            self.failed = path

    def describe(self) -> str:
        """Returns the current activity: "step 12, update_actor/forward"; after an error the phase that failed."""
        phase = self.failed or "/".join(self.stack)
        if self.step is None:
            return phase or "the start"
        return f"step {self.step}, {phase or 'between phases'}"


class Timers:
    """Wall-clock seconds of named phases, summed over one step.

    Names follow verl: gen, update_weights, reward, old_log_prob, ref, values, adv, update_critic, update_actor,
    testing, save_checkpoint. A nested phase is recorded as "outer/inner" and is also part of the outer one, so the
    phases without a slash add up.

    Attributes:
        ledger: Peak memory of the outermost phases.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        on_phase: Callable[[str], None] | None = None,
        current: CurrentPhase | None = None,
    ) -> None:
        """Creates the timers.

        Args:
            device: Device that runs the work; a CUDA device is synchronised at the start and end of each phase.
            on_phase: Callback that receives `CurrentPhase.describe()` at the start of each phase (`RunLog.phase` shows
                it on the console).
            current: Position that the timers update; None: one of their own.
        """
        self.ledger = PeakMemory(device)
        self._synchronize = torch.device(device).type == "cuda"
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._current = current or CurrentPhase()
        self._step_began: float | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times one step as `timing_s/step` and clears the phases of the previous step."""
        self._seconds = {}
        self.ledger.reset()
        self._current.step = step
        self._step_began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds["step"] = time.perf_counter() - self._step_began
            self._step_began = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the enclosed code; repeats in a step add up. After an error `CurrentPhase` names the failed phase."""
        current = self._current
        current.stack.append(name)
        current.failed = None
        path = "/".join(current.stack)
        if self._on_phase is not None:
            self._on_phase(current.describe())
        outermost = len(current.stack) == 1
        if outermost:
            self.ledger.begin()
        began = self._now()
        try:
            yield
            self._seconds[path] = self._seconds.get(path, 0.0) + self._now() - began
            if outermost:
                self.ledger.end(path)
        except BaseException:
            current.fail(path)
            raise
        finally:
            current.stack.pop()

    def heard(self, timings: Mapping[str, float]) -> None:
        """Adds phases that this rank did not run in this step, from another rank's `metrics`."""
        for name, value in timings.items():
            self._seconds.setdefault(name.removeprefix("timing_s/"), value)

    def metrics(self) -> dict[str, float]:
        """Returns `timing_s/<phase>` of the step so far; during a step `timing_s/step` is the time until now."""
        seconds = dict(self._seconds)
        if self._step_began is not None:
            seconds["step"] = time.perf_counter() - self._step_began
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
