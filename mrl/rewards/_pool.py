"""Worker processes under a time limit per sample.

Owns starting, feeding, killing and replacing workers. A batch is sent in chunks, so that the cost of a message is
shared, and answered sample by sample, so that each sample has its own clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from mrl.errors import UserError
from mrl.rewards._call import IGNORED, Outcome, Sample

STARTUP_LIMIT_S = 120.0
"""Imports of a worker may take this long: a reward function may import large packages."""

_EXIT_LIMIT_S = 5.0  # from a closed pipe to the end of its process
_LOOK_S = 0.5  # between two questions whether to stop
_MAX_CHUNK = 64  # samples in one message
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from mrl.rewards._worker import run; run()"


class _Worker:
    """One process, and the samples that it was sent and has not answered."""

    def __init__(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.pipe, other = Pipe()
        # A scheduler signals every process of the job. Until the worker can ignore it, the signal waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            with other:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(other.fileno()), str(os.getpid()), json.dumps(sys.path)],
                    pass_fds=(other.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward function prints must not mix with the trainer's output
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pending: deque[int] = deque()
        self.deadline = 0.0
        self._started = time.monotonic()
        with contextlib.suppress(OSError):  # it died at once; `wait_ready` says so
            self.pipe.send([(name, dict(kwargs)) for name, kwargs in calls])

    def wait_ready(self) -> None:
        """Returns when the functions are imported; raises UserError where they cannot be."""
        if not self.pipe.poll(max(0.0, self._started + STARTUP_LIMIT_S - time.monotonic())):
            self.stop()
            raise UserError(f"reward.functions: a worker did not import them within {STARTUP_LIMIT_S:g} s.")
        try:
            refusal = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise UserError(f"reward.functions: a worker died while it imported them ({self.ending()}).") from error
        if refusal:
            self.stop()
            raise UserError(refusal)

    def send(self, indices: Sequence[int], samples: Sequence[Sample], time_limit_s: float) -> bool:
        """Gives an idle worker its next samples; False where it is dead."""
        try:
            self.pipe.send([samples[index] for index in indices])
        except OSError:
            return False
        self.pending.extend(indices)
        self.deadline = time.monotonic() + time_limit_s
        return True

    def receive(self) -> list[Outcome] | None:
        """The outcomes of the first pending sample; None where the worker died over it."""
        try:
            outcomes: list[Outcome] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return outcomes

    def ending(self) -> str:
        """How the process ended, once its end of the pipe is closed."""
        try:
            status = self.process.wait(timeout=_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "it closed its pipe"
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def stop(self) -> None:
        """Kills the process."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """Scores samples with functions that may hang or die."""

    def __init__(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, num_workers: int, time_limit_s: float
    ) -> None:
        """Starts the workers and waits until each has imported the functions.

        Args:
            calls: Name and arguments of each function.
            num_workers: At least 1.
            time_limit_s: For one sample and all functions together, s.

        Raises:
            UserError: A function cannot be imported or called.
        """
        self._calls = calls
        self._time_limit_s = time_limit_s
        self._workers = [_Worker(calls) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.wait_ready()
        except UserError:
            self.close()
            raise

    def run(
        self, samples: Sequence[Sample], give_up_after: int, told_to_stop: Callable[[], bool] = lambda: False
    ) -> dict[int, list[Outcome]]:
        """Scores a batch.

        Args:
            samples: In any number.
            give_up_after: Stop when more than this many samples have failed.
            told_to_stop: Stop when this is true; the pool is only good for `close` then.

        Returns:
            Index of each sample -> one outcome for each function; complete unless it gave up.

        Raises:
            UserError: A worker that had to be replaced does not start again.
        """
        todo = deque(range(len(samples)))
        done: dict[int, list[Outcome]] = {}
        num_failed = 0
        while len(done) < len(samples) and num_failed <= give_up_after:
            if told_to_stop():
                return done
            self._feed(todo, samples)
            readable = self._wait()
            for slot, worker in enumerate(self._workers):
                if not worker.pending:
                    continue
                outcomes = worker.receive() if worker.pipe in readable else None
                if outcomes is not None:
                    worker.deadline = time.monotonic() + self._time_limit_s
                elif worker.pipe in readable:
                    outcomes = self._failed(f"the worker process died over it ({worker.ending()})")
                elif time.monotonic() >= worker.deadline and not worker.pipe.poll():
                    outcomes = self._failed(f"it took longer than reward.time_limit_s={self._time_limit_s:g}")
                else:
                    continue
                index = worker.pending.popleft()
                done[index] = outcomes
                num_failed += any(outcome.error for outcome in outcomes)
                if outcomes[0].lost:
                    todo.extendleft(reversed(worker.pending))
                    self._replace(slot)
        for slot, worker in enumerate(self._workers):
            if worker.pending:
                self._replace(slot)
        return done

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.stop()

    def _feed(self, todo: deque[int], samples: Sequence[Sample]) -> None:
        """Gives each idle worker a chunk; one that died while idle is replaced, and no sample is blamed."""
        for slot in range(len(self._workers)):
            if self._workers[slot].pending or not todo:
                continue
            size = max(1, min(_MAX_CHUNK, len(todo) // (2 * len(self._workers))))
            chunk = [todo.popleft() for _ in range(min(size, len(todo)))]
            while not self._workers[slot].send(chunk, samples, self._time_limit_s):
                self._replace(slot)

    def _wait(self) -> list[Any]:
        """The pipes with an answer, or none when the first deadline has come or it is time to look around."""
        busy = [worker for worker in self._workers if worker.pending]
        first_deadline = min(worker.deadline for worker in busy)
        left = max(0.0, first_deadline - time.monotonic())
        return wait([worker.pipe for worker in busy], min(left, _LOOK_S))

    def _failed(self, problem: str) -> list[Outcome]:
        return [Outcome(math.nan, problem, lost=True) for _ in self._calls]

    def _replace(self, slot: int) -> None:
        self._workers[slot].stop()
        self._workers[slot] = _Worker(self._calls)
        self._workers[slot].wait_ready()
