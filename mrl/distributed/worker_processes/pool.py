"""Bases of the reward and environment pools: a pool of worker processes, and the parent's handle of one worker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from mrl.distributed.worker_processes.worker_process import STARTUP_LIMIT_S, Channel, wait_for
from mrl.errors import UserError


class WorkerHandle(ABC):
    """The parent's handle of a worker process.

    Attributes:
        channel: Pipes and processes of the worker.
        is_ready: True once the worker has imported its code.
        lost: True if the worker has ended or sent a malformed message; it must be replaced.
    """

    def __init__(self, channel: Channel, setup: object, subject: str) -> None:
        """Sends the setup message to a worker that is starting.

        Args:
            channel: Channel of the worker.
            setup: First message to the worker.
            subject: Prefix of error messages, such as "environment 'guess'".
        """
        self.channel = channel
        self.is_ready = False
        self.lost = False
        self._subject = subject
        channel.send(setup)

    @property
    def start_deadline(self) -> float:
        """Time at which the worker must be ready, monotonic s."""
        return self.channel.started + STARTUP_LIMIT_S

    @abstractmethod
    def accept_ready(self, fields: Mapping[str, Any]) -> bool:
        """Stores the fields of the worker's ready message; returns False if they are malformed."""

    def poll_ready(self) -> bool:
        """Returns whether the worker is ready, without waiting.

        Raises:
            UserError: The worker cannot import its code, died, or exceeded the time limit.
        """
        if self.is_ready:
            return True
        late = time.monotonic() >= self.start_deadline
        message = self.channel.receive()
        if message is None and not self.channel.closed and not late:
            return False
        problem = f"{self._subject}: a worker died while it started (malformed message)."
        match message:
            case {"refusal": ""} if message is not None and self.accept_ready(message):
                self.is_ready = True
                return True
            case {"refusal": str(refusal)} if refusal:
                problem = refusal
            case {"ended": str(how)}:
                problem = f"{self._subject}: a worker died while it started ({how})."
            case None if self.channel.closed:
                problem = f"{self._subject}: a worker and its supervisor died while they started."
            case None:
                problem = f"{self._subject}: a worker did not start within {STARTUP_LIMIT_S:g} s."
        self.channel.stop()
        raise UserError(problem)


W = TypeVar("W", bound=WorkerHandle)


def wait_ready(workers: Sequence[WorkerHandle]) -> None:
    """Waits until all workers are ready; raises UserError if one cannot start."""
    while starting := [worker for worker in workers if not worker.poll_ready()]:
        first = min(worker.start_deadline for worker in starting)
        wait_for([worker.channel for worker in starting], first - time.monotonic())


class WorkerPool(Generic[W]):
    """Worker processes of one kind; subclasses distribute work and replace lost workers."""

    def __init__(self, start: Callable[[], W], num_workers: int) -> None:
        """Starts the workers and waits until all are ready.

        Args:
            start: Starts one worker.
            num_workers: Number of workers, from 1.

        Raises:
            UserError: A worker cannot start.
        """
        self._start = start
        self._workers = [start() for _ in range(num_workers)]
        try:
            wait_ready(self._workers)
        except UserError:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends the workers and all processes that they started."""
        for worker in self._workers:
            worker.channel.release()
        for worker in self._workers:
            worker.channel.stop()

    def _restart(self, slot: int) -> None:
        """Replaces a worker by a new one, which is not ready yet."""
        self._workers[slot].channel.stop()
        self._workers[slot] = self._start()
