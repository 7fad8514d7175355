"""The trainer's end of a reward worker: feeding it, believing it or not."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.distributed.worker_processes.worker_process import STARTUP_LIMIT_S, Channel, wait_for
from mrl.errors import UserError
from mrl.rewards import _wire
from mrl.rewards._call import Outcome, Way
from mrl.rewards._call_batches import Task
from mrl.rewards._signatures import Sample

Answered = tuple[Task, int, list[Outcome]]
"""A task, the row of one of its samples, and an outcome for each of the task's functions."""


class Worker:
    """One worker process.

    Attributes:
        channel: Its pipes and processes.
        pending: The tasks that it was sent and has not answered; it works on the first.
        deadline: Of the next answer, monotonic s.
        lost: It has ended, or cannot be believed.
        sources: Digest of the source of each function, once it is ready.
        ways: How each function is called, once it is ready.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], time_limit_s: float, memory_limit_mb: int
    ) -> None:
        """Starts the processes; `wait_ready` waits for them."""
        self.channel = Channel(
            "mrl.rewards._worker", memory_limit_mb=memory_limit_mb, memory_name="reward.memory_limit_mb"
        )
        self.pending: deque[Task] = deque()
        self.lost = False
        self.sources: tuple[str, ...] = ()
        self.ways: tuple[Way, ...] = ()
        self.deadline = 0.0
        self._num_calls = len(calls)
        self._num_done = 0
        self._left: list[int] = []  # places of the first task
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
        self.sources, self.ways = answer.sources, answer.ways

    def send(self, tasks: Sequence[Task], samples: Sequence[Sample]) -> bool:
        """Gives an idle worker its next tasks; False where it is dead, or has said what it was not asked."""
        if not self.channel.silent():
            return False
        self.channel.send([(task.calls, [[samples[row] for row in unit] for unit in task.units]) for task in tasks])
        self.pending.extend(tasks)
        self._begin()
        return True

    def take(self) -> list[Answered]:
        """The samples that it has answered or failed; it may be `lost` then. Does not wait."""
        late = time.monotonic() >= self.deadline
        found: list[Answered] = []
        while self.pending and not self.lost:
            task, answer = self.pending[0], self._answer()
            if answer is not None and self._is_for(task, answer):
                outcomes, places = list(answer.outcomes), [answer.place]
                self.lost = any(outcome.lost for outcome in outcomes)
            elif problem := self._problem(task, answer, late=late):
                outcomes, places = [Outcome(math.nan, problem, lost=True)] * len(task.calls), self._left[:1]
                self.lost = True
                if len(self._unit_of(task, places[0])) < len(self._left):
                    break  # nobody knows which of them it was: each is tried alone
            else:
                break
            late = False
            if self.lost:
                places = self._unit_of(task, places[0])
            self._left = [place for place in self._left if place not in places]
            if not self._left:
                self._num_done += 1
                self.pending.popleft()
            self._begin(task)
            found += [(task, task.rows[place], outcomes) for place in places]
        return found

    def unfinished(self) -> list[Task]:
        """What a lost worker has not answered; what waited with something that failed is alone now."""
        tasks = list(self.pending)
        if tasks and self._left:
            rows = tasks[0].rows
            left = {rows[place] for place in self._left}
            again = [tuple(row for row in unit if row in left) for unit in tasks[0].units]
            tasks[:1] = [Task(tasks[0].calls, (unit,)) for unit in again if unit]
        return tasks

    def _begin(self, before: Task | None = None) -> None:
        """The clock of the next answer, and what is to come of the first task, where it was not begun `before`."""
        if self.pending:
            if self.pending[0] is not before:
                self._left = list(range(len(self.pending[0].rows)))
            self.deadline = time.monotonic() + self._limit_s(self.pending[0])

    def _limit_s(self, task: Task) -> float:
        return self._time_limit_s * task.num_timed

    def _is_for(self, task: Task, answer: _wire.Answer) -> bool:
        told = answer.serial == self._num_done and answer.place in self._left
        return told and 0 < len(answer.outcomes) == len(task.calls)

    def _unit_of(self, task: Task, place: int) -> list[int]:
        """The places to come of the call that this one belongs to."""
        ends = list(itertools.accumulate(map(len, task.units)))
        unit = next(index for index, end in enumerate(ends) if place < end)
        return [other for other in self._left if ends[unit] - len(task.units[unit]) <= other < ends[unit]]

    def _problem(self, task: Task, answer: _wire.Answer | None, *, late: bool) -> str:
        """Why the first task gets no answer; "": it may take longer."""
        if answer is not None and answer.ended:
            return f"the worker process died over it ({answer.ended})"
        if answer is not None:
            return "something else than the worker wrote into the pipe of its answers"
        if self.channel.closed:
            return "the worker process died over it, and its keeper too"
        many = f" for each of {task.num_timed} samples" if task.num_timed > 1 else ""
        return f"it took longer than reward.time_limit_s={self._time_limit_s:g}{many}" if late else ""

    def _answer(self) -> _wire.Answer | None:
        """The next thing it said; what is no answer is an Answer that says nothing."""
        said = self.channel.receive()
        return None if said is None else _wire.read(said, self._num_calls)
