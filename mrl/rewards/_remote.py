"""The parent's handle of a reward worker: sends tasks and validates the answers."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.distributed.worker_processes.pool import WorkerHandle
from mrl.distributed.worker_processes.worker_process import Channel
from mrl.rewards import _wire
from mrl.rewards._call import CallStyle, Outcome
from mrl.rewards._call_batches import ScoringTask
from mrl.rewards._signatures import Sample

Scored = tuple[ScoringTask, int, list[Outcome]]
"""A task, the row of one of its samples, and an outcome of each of the task's functions."""


class RewardWorker(WorkerHandle):
    """Handle of a reward worker.

    Attributes:
        pending: Tasks without an answer; the worker processes the first.
        deadline: Time limit of the next answer, monotonic s.
        sources: Digest of the source file of each function, set when the worker is ready.
        styles: Calling style of each function, set when the worker is ready.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], time_limit_s: float, memory_limit_mb: int
    ) -> None:
        """Starts the worker process; `wait_ready` waits for it."""
        channel = Channel("mrl.rewards._worker", memory_limit_mb=memory_limit_mb, memory_name="reward.memory_limit_mb")
        super().__init__(channel, [(name, dict(kwargs)) for name, kwargs in calls], "reward.functions")
        self.pending: deque[ScoringTask] = deque()
        self.deadline = 0.0
        self.sources: tuple[str, ...] = ()
        self.styles: tuple[CallStyle, ...] = ()
        self._num_calls = len(calls)
        self._num_done = 0
        self._left: list[int] = []  # indices of the first task's samples without an answer
        self._time_limit_s = time_limit_s

    def accept_ready(self, fields: Mapping[str, Any]) -> bool:
        """Stores the sources and calling styles of the functions; returns False if they are malformed."""
        try:
            sources, styles = tuple(map(str, fields["sources"])), tuple(CallStyle(**one) for one in fields["styles"])
        except (KeyError, TypeError):
            return False
        self.sources, self.styles = sources, styles
        return len(sources) == len(styles) == self._num_calls

    def send(self, tasks: Sequence[ScoringTask], samples: Sequence[Sample]) -> bool:
        """Sends tasks to an idle worker; returns False if it has ended or sent something unrequested."""
        if not self.channel.silent():
            return False
        self.channel.send([(task.calls, [[samples[row] for row in unit] for unit in task.units]) for task in tasks])
        self.pending.extend(tasks)
        self._start_clock()
        return True

    def take(self) -> list[Scored]:
        """Returns the samples that were answered or failed since the last call; does not wait.

        The worker may be `lost` afterwards.
        """
        late = time.monotonic() >= self.deadline
        found: list[Scored] = []
        while self.pending and not self.lost:
            task, message = self.pending[0], self.channel.receive()
            answer = None if message is None else _wire.decode(message, self._num_calls)
            if answer is not None and self._is_for(task, answer):
                outcomes, places = list(answer.outcomes), [answer.place]
                self.lost = any(outcome.lost for outcome in outcomes)
            elif problem := self._problem(task, message, late=late):
                outcomes, places = [Outcome(math.nan, problem, lost=True)] * len(task.calls), self._left[:1]
                self.lost = True
                if len(self._unit_of(task, places[0])) < len(self._left):
                    break  # one of several concurrent calls failed: each is retried alone
            else:
                break
            late = False
            if self.lost:
                places = self._unit_of(task, places[0])
            self._left = [place for place in self._left if place not in places]
            if not self._left:
                self._num_done += 1
                self.pending.popleft()
            self._start_clock(task)
            found += [(task, task.rows[place], outcomes) for place in places]
        return found

    def unfinished(self) -> list[ScoringTask]:
        """Returns the tasks that a lost worker has not answered, with concurrent calls split into single ones."""
        tasks = list(self.pending)
        if tasks and self._left:
            rows = tasks[0].rows
            left = {rows[place] for place in self._left}
            again = [tuple(row for row in unit if row in left) for unit in tasks[0].units]
            tasks[:1] = [ScoringTask(tasks[0].calls, (unit,)) for unit in again if unit]
        return tasks

    def _start_clock(self, before: ScoringTask | None = None) -> None:
        """Sets the deadline of the next answer; resets `_left` if the first task is not `before`."""
        if self.pending:
            if self.pending[0] is not before:
                self._left = list(range(len(self.pending[0].rows)))
            self.deadline = time.monotonic() + self._time_limit_s * self.pending[0].num_timed

    def _is_for(self, task: ScoringTask, answer: _wire.ScoredSample) -> bool:
        expected = answer.serial == self._num_done and answer.place in self._left
        return expected and 0 < len(answer.outcomes) == len(task.calls)

    def _unit_of(self, task: ScoringTask, place: int) -> list[int]:
        """Returns the indices without an answer that belong to the same call as `place`."""
        ends = list(itertools.accumulate(map(len, task.units)))
        unit = next(index for index, end in enumerate(ends) if place < end)
        return [other for other in self._left if ends[unit] - len(task.units[unit]) <= other < ends[unit]]

    def _problem(self, task: ScoringTask, message: Mapping[str, Any] | None, *, late: bool) -> str:
        """Returns why the first task gets no answer; "" while it may still take time."""
        match message:
            case {"ended": str(how)}:
                return f"the worker process died over it ({how})"
            case None if self.channel.closed:
                return "the worker process and its supervisor died over it"
            case None:
                each = f" for each of {task.num_timed} samples" if task.num_timed > 1 else ""
                return f"it took longer than reward.time_limit_s={self._time_limit_s:g}{each}" if late else ""
        return "something else than the worker wrote into the pipe of its answers"
