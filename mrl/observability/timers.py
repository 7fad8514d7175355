"""Wall-clock timers of the phases of a step, and the name of the current phase for error messages and the watchdog.

Every rank has its own `Timers`; only those of rank 0 are logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from mrl.observability.memory_peaks import PeakMemory


class Timers:
    """Wall-clock seconds of named phases, summed over one step.

    Names follow verl: gen, update_weights, reward, old_log_prob, ref, values, adv, update_critic, update_actor,
    testing, save_checkpoint. A nested phase is recorded as "outer/inner" and is also part of the outer one, so the
    phases without a slash add up.

    Attributes:
        ledger: Peak memory of the outermost phases.
    """

    def __init__(self, device: str | torch.device = "cpu", on_phase: Callable[[str], None] | None = None) -> None:
        """Creates the timers.

        Args:
            device: Device that runs the work; a CUDA device is synchronised at the start and end of each phase.
            on_phase: Callback that receives `where` at the start of each phase (`RunLog.phase` shows it on the
                console).
        """
        self.ledger = PeakMemory(device)
        self._synchronize = torch.device(device).type == "cuda"
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._failed: str | None = None
        self._step: int | None = None
        self._step_began: float | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times one step as `timing_s/step` and clears the phases of the previous step."""
        self._seconds = {}
        self.ledger.reset()
        self._step = step
        self._step_began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds["step"] = time.perf_counter() - self._step_began
            self._step_began = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the enclosed code; repeats in a step add up. After an error `where` names the phase that failed."""
        self._stack.append(name)
        self._failed = None
        path = "/".join(self._stack)
        if self._on_phase is not None:
            self._on_phase(self.where)
        outermost = len(self._stack) == 1
        if outermost:
            self.ledger.begin()
        began = self._now()
        try:
            yield
            self._seconds[path] = self._seconds.get(path, 0.0) + self._now() - began
            if outermost:
                self.ledger.end(path)
        except BaseException:
            self._fail(path)
            raise
        finally:
            self._stack.pop()

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

    @property
    def has_begun(self) -> bool:
        """True if a step was started."""
        return self._step is not None

    @property
    def where(self) -> str:
        """Current activity as text: "step 12, update_actor/forward"; after an error the phase that failed."""
        phase = self._failed or "/".join(self._stack)
        if self._step is None:
            return phase or "the start"
        return f"step {self._step}, {phase or 'between phases'}"

    def _fail(self, path: str) -> None:
        if self._failed is None:
            self._failed = path

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
