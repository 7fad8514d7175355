"""The trainer's end of a reward worker: feeding it, believing it or not."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.errors import UserError
from mrl.processes.channel import STARTUP_LIMIT_S, Channel, wait_for
from mrl.rewards import _wire
from mrl.rewards._call import Outcome
from mrl.rewards._signatures import Sample


class Worker:
    """One worker process.

    Attributes:
        channel: Its pipes and processes.
        pending: The samples that it was sent and has not answered.
        deadline: Of the first of them, monotonic s.
        lost: It has ended, or cannot be believed.
        sources: Digest of the source of each function, once it is ready.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], time_limit_s: float, memory_limit_mb: int
    ) -> None:
        """Starts the processes; `wait_ready` waits for them."""
        self.channel = Channel(
            "mrl.rewards._worker", memory_limit_mb=memory_limit_mb, memory_name="reward.memory_limit_mb"
        )
        self.pending: deque[int] = deque()
        self.lost = False
        self.sources: tuple[str, ...] = ()
        self.deadline = 0.0
        self._num_calls = len(calls)
        self._answered = 0
        self._time_limit_s = time_limit_s
        self.channel.send([(name, dict(kwargs)) for name, kwargs in calls])

    def wait_ready(self) -> None:
        """Returns when the functions are imported; raises UserError where they cannot be."""
        while (answer := self._answer()) is None and not self.channel.closed:
            left = self.channel.started + STARTUP_LIMIT_S - time.monotonic()
            if left <= 0:
                self.channel.stop()
                raise UserError(f"reward.functions: a worker did not import them within {STARTUP_LIMIT_S:g} s.")
            wait_for([self.channel], left)
        if answer is None or answer.refusal is None:
            self.channel.stop()
            how = answer.ended if answer is not None and answer.ended else "it wrote into the pipe of its answers"
            raise UserError(f"reward.functions: a worker died while it imported them ({how}).")
        if answer.refusal:
            self.channel.stop()
            raise UserError(answer.refusal)
        self.sources = answer.sources

    def send(self, indices: Sequence[int], samples: Sequence[Sample]) -> bool:
        """Gives an idle worker its next samples; False where it is dead, or has said what it was not asked."""
        if not self.channel.silent():
            return False
        self.channel.send([samples[index] for index in indices])
        self.pending.extend(indices)
        self.deadline = time.monotonic() + self._time_limit_s
        return True

    def take(self) -> Iterator[tuple[int, list[Outcome]]]:
        """The samples that it has answered or failed, with their outcomes; it may be `lost` then. Does not wait."""
        late = time.monotonic() >= self.deadline
        while self.pending and not self.lost:
            outcomes = self._outcomes(late)
            if outcomes is None:
                return
            late = False
            self.deadline = time.monotonic() + self._time_limit_s
            self.lost = any(outcome.lost for outcome in outcomes)
            self._answered += 1
            yield self.pending.popleft(), outcomes

    def _outcomes(self, late: bool) -> list[Outcome] | None:
        """Of the first pending sample; None: it may take longer."""
        answer = self._answer()
        if answer is not None and answer.outcomes and answer.serial == self._answered:
            return list(answer.outcomes)
        if answer is not None and answer.ended:
            return self._failed(f"the worker process died over it ({answer.ended})")
        if answer is not None:
            return self._failed("something else than the worker wrote into the pipe of its answers")
        if self.channel.closed:
            return self._failed("the worker process died over it, and its keeper too")
        return self._failed(f"it took longer than reward.time_limit_s={self._time_limit_s:g}") if late else None

    def _failed(self, problem: str) -> list[Outcome]:
        return [Outcome(math.nan, problem, lost=True)] * self._num_calls

    def _answer(self) -> _wire.Answer | None:
        """The next thing it said; what is no answer is an Answer that says nothing."""
        said = self.channel.receive()
        return None if said is None else _wire.read(said, self._num_calls)
