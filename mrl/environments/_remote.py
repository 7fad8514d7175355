"""The parent's end of an environment worker: feeding it, believing it or not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mrl.distributed.worker_processes.landlock_seccomp import Confinement
from mrl.distributed.worker_processes.worker_process import STARTUP_LIMIT_S, Channel
from mrl.environments._wire import believed
from mrl.environments.base import Observation, Schema
from mrl.errors import UserError

Cause = Literal["timeout", "crash", "memory", "processes", "malformed", "too_large", "error", "replay"]
"""Why an episode failed: its time, memory or processes, its worker's end, what it returned, what it raised, or that it
is no function of its seed, row and actions."""


@dataclass(frozen=True)
class Failure:
    """Why an episode ended without an answer.

    Attributes:
        cause: In a word.
        message: With the environment, the sample and the turn.
    """

    cause: Cause
    message: str


@dataclass(frozen=True)
class Limits:
    """What a worker may take.

    Attributes:
        time_s: For one answer, s.
        memory_mb: For a worker and all that it starts, MiB; 0: none.
        max_processes: That a worker and what it starts may be at one time; 0: any number.
        confinement: What it may reach.
    """

    time_s: float
    memory_mb: int
    max_processes: int
    confinement: Confinement


@dataclass(frozen=True)
class Asked:
    """What a worker was asked: to start, to answer an episode's command, or to close an episode."""

    word: Literal["start", "open", "step", "close"]
    episode: str = ""
    ticket: int = -1
    turn: int = 0


class Worker:
    """One worker process.

    Attributes:
        channel: Its pipes and processes.
        pending: What it was asked and has not answered, in order.
        tools: Schemas of its environment's tools, known once it has started.
        missing: What of its confinement this machine does not have, known once it has started.
        lost: It has ended, or cannot be believed; it is of no use then.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any], limits: Limits) -> None:
        """Starts the processes."""
        self.channel = Channel(
            "mrl.environments._worker",
            memory_limit_mb=limits.memory_mb,
            memory_name="its limit of memory in MiB",
            max_processes=limits.max_processes,
        )
        self.pending: deque[Asked] = deque([Asked("start")])
        self.tools: list[Schema] = []
        self.missing: list[str] = []
        self.lost = False
        self._name = name
        self._limits = limits
        self._answered = 0
        self._head_since = self.channel.started
        self.channel.send((name, dict(kwargs), limits.confinement))

    @property
    def deadline(self) -> float:
        """Of the first thing that is pending, monotonic s."""
        limit_s = STARTUP_LIMIT_S if self.pending[0].word == "start" else self._limits.time_s
        return self._head_since + limit_s

    def ask(self, asked: Asked, *args: Any) -> None:
        """Queues a command."""
        if not self.pending:
            self._head_since = time.monotonic()
        self.pending.append(asked)
        self.channel.send((asked.word, asked.ticket, *args))

    def take(self) -> Iterator[tuple[Asked, Observation | Failure]]:
        """What it has answered or failed; it may be `lost` then. Does not wait. A closed episode has no answer.

        Raises:
            UserError: It cannot start.
        """
        late = bool(self.pending) and time.monotonic() >= self.deadline
        while self.pending and not self.lost:
            said = self.channel.receive()
            if said is None and not self.channel.closed and not late:
                return
            late = False
            asked = self.pending[0]
            outcome = self._outcome(asked, said)
            self.pending.popleft()
            self._head_since = time.monotonic()
            if outcome is not None:
                yield asked, outcome
        if not self.pending and not self.lost and not self.channel.silent():
            self.lost = True

    def _outcome(self, asked: Asked, said: dict[str, Any] | None) -> Observation | Failure | None:
        if asked.word == "start":
            self._started(said)
            return None
        if said is None:
            return self._fatal(
                *(
                    ("crash", "its worker process died, and its keeper too")
                    if self.channel.closed
                    else ("timeout", f"it took longer than its limit of {self._limits.time_s:g} s")
                )
            )
        match said:
            case {"ended": str(how), "limit": "memory" | "processes" as limit}:
                return self._fatal(limit, f"its worker process was ended ({how})")
            case {"ended": str(how)}:
                return self._fatal("crash", f"its worker process died ({how})")
            case {"serial": serial, **fields} if serial == self._answered:
                self._answered += 1
                return self._answer(fields)
        return self._fatal("malformed", "something else than its worker wrote into the pipe of its answers")

    def _answer(self, fields: Mapping[str, Any]) -> Observation | Failure | None:
        match fields:
            case {"closed": True}:
                return None
            case {"observation": dict(observation)}:
                try:
                    return believed(observation)
                except ValueError as error:
                    return self._fatal("malformed", f"its worker wrote {error}")
            case {"failure": "memory"}:  # nobody knows what the process still holds
                return self._fatal("memory", f"MemoryError: it may take {self._limits.memory_mb} MiB")
            case {"failure": "error" | "malformed" | "too_large" as cause, "message": str(message)}:
                return Failure(cause, message)
        return self._fatal("malformed", "its worker wrote an answer that is none")

    def _fatal(self, cause: Cause, message: str) -> Failure:
        self.lost = True
        return Failure(cause, message)

    def _started(self, said: dict[str, Any] | None) -> None:
        match said:
            case {"refusal": "", "tools": list(tools), "missing": list(missing)}:
                self.tools, self.missing = tools, missing
                return
            case {"refusal": str(refusal)} if refusal:
                problem = refusal
            case {"ended": str(how)}:
                problem = f"environment '{self._name}': a worker died while it started ({how})."
            case None if not self.channel.closed:
                problem = f"environment '{self._name}': a worker did not start within {STARTUP_LIMIT_S:g} s."
            case _:
                problem = f"environment '{self._name}': a worker died while it started, or wrote what it should not."
        self.channel.stop()
        raise UserError(problem)
