"""Worker processes under a time limit per sample.

Owns which worker gets which samples, and when one is replaced. A batch is sent in chunks, so that the cost of a message
is shared, and answered sample by sample, so that each call has its own clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mrl.distributed.worker_processes.worker_process import wait_for
from mrl.errors import UserError
from mrl.rewards._call import Way
from mrl.rewards._call_batches import Task
from mrl.rewards._remote import Answered, Worker
from mrl.rewards._signatures import Sample

_LOOK_S = 0.5  # between two questions whether to stop
_MAX_CHUNK = 64  # samples in one message


class WorkerPool:
    """Scores samples with functions that may hang or die."""

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
            calls: Name and arguments of each function.
            num_workers: At least 1.
            time_limit_s: For one sample and all functions that are called with it together, s; a call with several
                samples may take as many times as long.
            memory_limit_mb: For one worker and all that its functions start, MiB; 0: none.

        Raises:
            UserError: A function cannot be imported or called.
        """
        self._start: Callable[[], Worker] = partial(Worker, calls, time_limit_s, memory_limit_mb)
        self._workers = [self._start() for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.wait_ready()
        except UserError:
            self.close()
            raise

    @property
    def sources(self) -> tuple[str, ...]:
        """Digest of the source of each function."""
        return self._workers[0].sources

    @property
    def ways(self) -> tuple[Way, ...]:
        """How each function is called."""
        return self._workers[0].ways

    def run(
        self,
        samples: Sequence[Sample],
        tasks: Iterable[Task],
        give_up_after: int,
        told_to_stop: Callable[[], bool] = lambda: False,
        tell: Callable[[list[Answered]], None] = lambda answered: None,
    ) -> None:
        """Scores a batch.

        Args:
            samples: By row.
            tasks: What is to be called.
            give_up_after: Stop when more than this many samples have failed.
            told_to_stop: Stop when this is true; the pool is only good for `close` then.
            tell: Called with samples as soon as they are scored; with all of them unless it gave up.

        Raises:
            UserError: A worker that had to be replaced does not start again.
        """
        todo = deque(tasks)
        failed: set[int] = set()
        while (todo or any(worker.pending for worker in self._workers)) and len(failed) <= give_up_after:
            if told_to_stop():
                return
            self._feed(todo, samples)
            self._wait()
            for slot, worker in enumerate(self._workers):
                if answered := worker.take():
                    tell(answered)
                    failed.update(row for _, row, outcomes in answered if any(outcome.error for outcome in outcomes))
                if worker.lost:
                    todo.extendleft(reversed(worker.unfinished()))
                    self._replace(slot)
        for slot, worker in enumerate(self._workers):
            if worker.pending:
                self._replace(slot)

    def close(self) -> None:
        """Ends the workers and all that their functions started."""
        for worker in self._workers:
            worker.channel.release()
        for worker in self._workers:
            worker.channel.stop()

    def _feed(self, todo: deque[Task], samples: Sequence[Sample]) -> None:
        """Gives each idle worker a chunk; one that died while idle is replaced, and no sample is blamed."""
        idle = [slot for slot, worker in enumerate(self._workers) if not worker.pending] if todo else []
        left = sum(task.num_rows for task in todo) if idle else 0
        for slot in idle:
            if not todo:
                break
            fair = left if len(self._workers) == 1 else left // (2 * len(self._workers))
            size = max(1, min(_MAX_CHUNK, fair))
            chunk: list[Task] = []
            num_rows = 0
            while todo and num_rows < size:
                chunk.append(todo.popleft())
                num_rows += chunk[-1].num_rows
            left -= num_rows
            while not self._workers[slot].send(chunk, samples):
                self._replace(slot)

    def _wait(self) -> None:
        """Until there is an answer, the first deadline has come, or it is time to look around."""
        busy = [worker for worker in self._workers if worker.pending]
        first_deadline = min(worker.deadline for worker in busy)
        wait_for([worker.channel for worker in busy], min(first_deadline - time.monotonic(), _LOOK_S))

    def _replace(self, slot: int) -> None:
        self._workers[slot].channel.stop()
        self._workers[slot] = self._start()
        self._workers[slot].wait_ready()
