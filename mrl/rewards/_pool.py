"""Pool of reward workers with a time limit per sample.

Tasks are sent in chunks, which amortises the cost of a message, and answered sample by sample, so that every call has
its own time limit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mrl.distributed.worker_processes.pool import WorkerPool, wait_ready
from mrl.distributed.worker_processes.worker_process import wait_for
from mrl.rewards._call import CallStyle
from mrl.rewards._call_batches import ScoringTask
from mrl.rewards._remote import RewardWorker, Scored
from mrl.rewards._signatures import Sample

_POLL_S = 0.5  # interval at which `abort_requested` is polled
_MAX_CHUNK = 64  # samples per message


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
