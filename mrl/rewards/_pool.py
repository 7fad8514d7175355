"""Pool of reward workers with a time limit per sample.

Tasks are sent in chunks, which amortises the cost of a message, and answered sample by sample, so that every call has
its own time limit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mrl.distributed.worker_processes.pool import WorkerHandle, WorkerPool, wait_ready
from mrl.distributed.worker_processes.worker_process import Channel, wait_for
from mrl.rewards import _messages
from mrl.rewards._bound_reward import CallStyle, Outcome
from mrl.rewards._call_batches import ScoringTask
from mrl.rewards._signatures import Sample

_POLL_S = 0.5  # interval at which `abort_requested` is polled
_MAX_CHUNK = 64  # samples per message

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
            answer = None if message is None else _messages.decode(message, self._num_calls)
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

    def _is_for(self, task: ScoringTask, answer: _messages.ScoredSample) -> bool:
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


class RewardPool(WorkerPool[RewardWorker]):
    """Scores samples with functions that may hang or crash."""

    def __init__(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        num_workers: int,
        time_limit_s: float,
        memory_limit_mb: int,
    ) -> None:
        """Starts the workers and waits until each has imported the functions.

        Args:
            calls: Name and kwargs of each function.
            num_workers: Number of worker processes, from 1.
            time_limit_s: Time limit of one sample, for all functions that score it together, s; the limit of a call
                with several samples is multiplied by their number.
            memory_limit_mb: Memory limit of a worker and its descendants together, MiB; 0: unlimited.

        Raises:
            UserError: A function cannot be imported or called.
        """
        super().__init__(partial(RewardWorker, calls, time_limit_s, memory_limit_mb), num_workers)

    @property
    def sources(self) -> tuple[str, ...]:
        """Digest of the source file of each function."""
        return self._workers[0].sources

    @property
    def styles(self) -> tuple[CallStyle, ...]:
        """Calling style of each function."""
        return self._workers[0].styles

    def run(
        self,
        samples: Sequence[Sample],
        tasks: Iterable[ScoringTask],
        give_up_after: int,
        abort_requested: Callable[[], bool] = lambda: False,
        on_scored: Callable[[list[Scored]], None] = lambda scored: None,
    ) -> None:
        """Scores a batch.

        Args:
            samples: Samples by row.
            tasks: Calls to make.
            give_up_after: Number of failed samples above which scoring stops.
            abort_requested: Polled; once it returns true, scoring stops and the pool can only be shut down.
            on_scored: Callback for scored samples; receives all of them unless scoring stops early.

        Raises:
            UserError: The replacement of a lost worker cannot start.
        """
        todo = deque(tasks)
        failed: set[int] = set()
        while (todo or any(worker.pending for worker in self._workers)) and len(failed) <= give_up_after:
            if abort_requested():
                return
            self._assign(todo, samples)
            self._wait()
            for slot, worker in enumerate(self._workers):
                if scored := worker.take():
                    on_scored(scored)
                    failed.update(row for _, row, outcomes in scored if any(outcome.error for outcome in outcomes))
                if worker.lost:
                    todo.extendleft(reversed(worker.unfinished()))
                    self._replace(slot)
        for slot, worker in enumerate(self._workers):
            if worker.pending:
                self._replace(slot)

    def _assign(self, todo: deque[ScoringTask], samples: Sequence[Sample]) -> None:
        """Sends a chunk of tasks to each idle worker; replaces workers that died while idle."""
        idle = [slot for slot, worker in enumerate(self._workers) if not worker.pending] if todo else []
        left = sum(task.num_rows for task in todo) if idle else 0
        for slot in idle:
            if not todo:
                break
            fair = left if len(self._workers) == 1 else left // (2 * len(self._workers))
            size = max(1, min(_MAX_CHUNK, fair))
            chunk: list[ScoringTask] = []
            num_rows = 0
            while todo and num_rows < size:
                chunk.append(todo.popleft())
                num_rows += chunk[-1].num_rows
            left -= num_rows
            while not self._workers[slot].send(chunk, samples):
                self._replace(slot)

    def _wait(self) -> None:
        """Waits for an answer, the first deadline, or the poll interval."""
        busy = [worker for worker in self._workers if worker.pending]
        first_deadline = min(worker.deadline for worker in busy)
        wait_for([worker.channel for worker in busy], min(first_deadline - time.monotonic(), _POLL_S))

    def _replace(self, slot: int) -> None:
        self._restart(slot)
        wait_ready([self._workers[slot]])
