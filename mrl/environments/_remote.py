"""The parent's handle of an environment worker: sends commands and validates the answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mrl.distributed.worker_processes.landlock_seccomp import Confinement
from mrl.distributed.worker_processes.pool import WorkerHandle
from mrl.distributed.worker_processes.worker_process import Channel
from mrl.environments._wire import decode
from mrl.environments.base import Observation, Schema

Cause = Literal["timeout", "crash", "memory", "processes", "malformed", "too_large", "error", "replay"]
"""Why an episode failed: a limit of time, memory or processes; death of its worker; a malformed or too large answer; an
exception; or a replay with other observations."""


@dataclass(frozen=True)
class Failure:
    """Reason why an episode ended without an answer.

    Attributes:
        cause: Kind of failure.
        message: Description with the environment, the sample and the turn.
    """

    cause: Cause
    message: str


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of an environment worker.

    Attributes:
        time_s: Time limit of one answer, s.
        memory_mb: Memory limit of a worker and its descendants together, MiB; 0: unlimited.
        max_processes: Number of simultaneous processes, the worker and its descendants; 0: unlimited.
        confinement: Rights of the worker.
    """

    time_s: float
    memory_mb: int
    max_processes: int
    confinement: Confinement


@dataclass(frozen=True)
class Command:
    """A command that a worker was sent.

    Attributes:
        word: Kind of command.
        episode: Id of the episode.
        ticket: Number of the episode among all of the pool; unique, unlike ids.
        turn: Index of the observation that the command asks for.
    """

    word: Literal["open", "step", "close"]
    episode: str
    ticket: int
    turn: int = 0


class EnvironmentWorker(WorkerHandle):
    """Handle of an environment worker.

    Attributes:
        pending: Commands without an answer, in order; can be queued before the worker is ready.
        tools: Schemas of the environment's tools, set when the worker is ready.
        missing: Parts of the confinement that this machine does not support, set when the worker is ready.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any], limits: WorkerLimits) -> None:
        """Starts the worker process; `poll_ready` reports when it is ready."""
        channel = Channel(
            "mrl.environments._worker",
            memory_limit_mb=limits.memory_mb,
            memory_name="its limit of memory in MiB",
            max_processes=limits.max_processes,
        )
        super().__init__(channel, (name, dict(kwargs), limits.confinement), f"environment '{name}'")
        self.pending: deque[Command] = deque()
        self.tools: list[Schema] = []
        self.missing: list[str] = []
        self._limits = limits
        self._num_answers = 0
        self._clock_start = 0.0

    def accept_ready(self, fields: Mapping[str, Any]) -> bool:
        """Stores the tools and the missing parts of the confinement; returns False if they are malformed."""
        match fields:
            case {"tools": list(tools), "missing": list(missing)}:
                self.tools, self.missing = tools, missing
                self._clock_start = time.monotonic()
                return True
        return False

    @property
    def is_busy(self) -> bool:
        """True while the worker starts or has pending commands."""
        return not self.is_ready or bool(self.pending)

    @property
    def deadline(self) -> float:
        """Time limit of the start or of the first pending command, monotonic s."""
        return self._clock_start + self._limits.time_s if self.is_ready else self.start_deadline

    def send(self, command: Command, *args: Any) -> None:
        """Queues a command."""
        if not self.pending:
            self._clock_start = time.monotonic()
        self.pending.append(command)
        self.channel.send((command.word, command.ticket, *args))

    def take(self) -> Iterator[tuple[Command, Observation | Failure]]:
        """Yields the answers and failures that have arrived; does not wait. A "close" command has no answer.

        The worker may be `lost` afterwards.

        Raises:
            UserError: The worker cannot start.
        """
        if not self.poll_ready():
            return
        late = bool(self.pending) and time.monotonic() >= self.deadline
        while self.pending and not self.lost:
            message = self.channel.receive()
            if message is None and not self.channel.closed and not late:
                return
            late = False
            command = self.pending[0]
            outcome = self._outcome(message)
            self.pending.popleft()
            self._clock_start = time.monotonic()
            if outcome is not None:
                yield command, outcome
        if not self.pending and not self.lost and not self.channel.silent():
            self.lost = True

    def _outcome(self, message: dict[str, Any] | None) -> Observation | Failure | None:
        """Converts a message, or its absence, to the outcome of the first pending command; None for a "close"."""
        match message:
            case None if self.channel.closed:
                return self._fatal("crash", "its worker process and the supervisor died")
            case None:
                return self._fatal("timeout", f"it took longer than its limit of {self._limits.time_s:g} s")
            case {"ended": str(how), "limit": "memory" | "processes" as limit}:
                return self._fatal(limit, f"its worker process was ended ({how})")
            case {"ended": str(how)}:
                return self._fatal("crash", f"its worker process died ({how})")
            case {"serial": serial, **fields} if serial == self._num_answers:
                self._num_answers += 1
                return self._answer(fields)
        return self._fatal("malformed", "something else than its worker wrote into the pipe of its answers")

    def _answer(self, fields: Mapping[str, Any]) -> Observation | Failure | None:
        match fields:
            case {"closed": True}:
                return None
            case {"observation": dict(observation)}:
                try:
                    return decode(observation)
                except ValueError as error:
                    return self._fatal("malformed", f"its worker wrote {error}")
            case {"failure": "memory"}:  # the process may still use the memory, so it is replaced
                return self._fatal("memory", f"MemoryError: it may take {self._limits.memory_mb} MiB")
            case {"failure": "error" | "malformed" | "too_large" as cause, "message": str(message)}:
                return Failure(cause, message)
        return self._fatal("malformed", "its worker wrote a malformed answer")

    def _fatal(self, cause: Cause, message: str) -> Failure:
        self.lost = True
        return Failure(cause, message)
