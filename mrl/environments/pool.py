"""Pool of environments of many episodes, in worker processes.

`open` and `send` return immediately, and `poll` returns the replies that have arrived. A worker runs several episodes
and processes their commands one at a time, each under its own time limit. A worker that hangs, dies or sends a
malformed answer is killed with all processes that it started. The episode whose command it was processing fails with a
cause; its other episodes are replayed on a new worker from their recorded actions, and must give the same observations.

    with EnvironmentPool("guess", {}, num_workers=4, time_limit_s=10, memory_limit_mb=1024) as pool:
        pool.open("3.0", seed=7, row={}, label="train.jsonl:4 (uid 3, sample 0)")
        for reply in pool.wait(1.0):
            print(reply.episode, reply.observation or reply.failure)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from mrl.distributed.worker_processes.landlock_seccomp import Confinement
from mrl.distributed.worker_processes.pool import WorkerHandle, WorkerPool
from mrl.distributed.worker_processes.worker_process import Channel, wait_for
from mrl.environments._messages import decode, digest
from mrl.environments.base import Action, Observation, Schema

MAX_PROCESSES = 64
"""Number of simultaneous processes of one worker, including those that its environments start."""

MAX_FILE_MB = 1024
"""Largest file that an environment may write, MiB."""

Cause = Literal["timeout", "crash", "memory", "processes", "malformed", "too_large", "error", "replay"]
"""Kind of an episode's failure: a limit of time, memory or processes; death of its worker; a malformed or too large
answer; an exception; or a replay with other observations."""


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
            case {"serial": serial} if serial == self._num_answers:
                self._num_answers += 1
                return self._answer(message)
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


@dataclass(frozen=True)
class Reply:
    """Reply to an `open` or a `send`.

    Attributes:
        episode: Id of the episode.
        observation: Observation of the environment; None if the episode failed.
        failure: Reason of the failure, or None; a failed episode is over and needs no `close`.
    """

    episode: str
    observation: Observation | None = None
    failure: Failure | None = None


@dataclass
class _Episode:
    """An open episode.

    Attributes:
        label: Name of the sample, for messages.
        seed: Argument of `Environment.reset`.
        row: Argument of `Environment.reset`.
        slot: Index of its worker.
        ticket: Number of the episode among all of the pool, because ids can be reused.
        actions: All actions so far.
        seen: Digest of each observation that was returned.
        failure: Failure of a replay while no reply was due; returned with the next reply.
    """

    label: str
    seed: int
    row: dict[str, Any]
    slot: int
    ticket: int
    actions: list[Action] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def waits(self) -> bool:
        """True if a reply is due."""
        return len(self.seen) <= len(self.actions)


class EnvironmentPool(WorkerPool[EnvironmentWorker], AbstractContextManager["EnvironmentPool"]):
    """Pool of environments in worker processes; see the module."""

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        *,
        num_workers: int,
        time_limit_s: float,
        memory_limit_mb: int,
        max_processes: int = MAX_PROCESSES,
        network: bool = False,
        writable: Sequence[str] = (),
    ) -> None:
        """Starts the workers and waits until each has imported the environment.

        Args:
            name: Name of a file in `mrl/environments/`, or path of a user's class.
            kwargs: Arguments of the environment's constructor.
            num_workers: Number of worker processes, from 1.
            time_limit_s: Time limit of one answer, s.
            memory_limit_mb: Memory limit of a worker and its descendants together, MiB; 0: unlimited.
            max_processes: Number of simultaneous processes of a worker and its descendants; 0: unlimited.
            network: True to allow sockets; environments with `network = True` may use them in any case.
            writable: Folders below which environments may change files, in addition to the worker's temporary folder.

        Raises:
            UserError: The environment cannot be imported or constructed.
        """
        self._name = name
        self._episodes: dict[str, _Episode] = {}
        self._tickets = count()
        self._early: list[Reply] = []
        folders = tuple(str(Path(folder).absolute()) for folder in writable)
        confinement = Confinement(network=network, writable=folders, file_mb=MAX_FILE_MB)
        limits = WorkerLimits(time_limit_s, memory_limit_mb, max_processes, confinement)
        super().__init__(partial(EnvironmentWorker, name, dict(kwargs), limits), num_workers)

    @property
    def tools(self) -> list[Schema]:
        """Schemas of the environment's tools, for the chat template."""
        return self._workers[0].tools

    @property
    def missing_confinement(self) -> list[str]:
        """Parts of the confinement that this machine does not support; [] if all are in effect."""
        return self._workers[0].missing

    def open(
        self,
        episode: str,
        seed: int,
        row: Mapping[str, Any],
        label: str = "",
        past: Sequence[tuple[Observation, Action]] = (),
    ) -> None:
        """Starts an episode; the reply is the observation of `reset`, or the one after `past`.

        Args:
            episode: Id that no open episode has.
            seed: Argument of `Environment.reset`.
            row: Argument of `Environment.reset`.
            label: Name of the sample for messages, such as "train.jsonl:4 (uid 3, sample 0)".
            past: Observation and following action of each earlier turn, to resume an episode. They are replayed, and
                the episode fails if an observation differs.
        """
        if episode in self._episodes:
            raise ValueError(f"episode '{episode}' is open")
        load = [sum(other.slot == slot for other in self._episodes.values()) for slot in range(len(self._workers))]
        made = _Episode(label or f"episode {episode}", seed, dict(row), load.index(min(load)), next(self._tickets))
        made.actions = [action for _, action in past]
        made.seen = [digest(observation) for observation, _ in past]
        self._episodes[episode] = made
        self._send_commands(episode)

    def send(self, episode: str, action: Action) -> None:
        """Sends the next action to an episode that has replied."""
        if self._episodes[episode].waits:
            raise ValueError(f"episode '{episode}' has not replied to what came before")
        self._episodes[episode].actions.append(action)
        if (failure := self._episodes[episode].failure) is not None:
            del self._episodes[episode]
            self._early.append(Reply(episode, failure=failure))
        else:
            self._send_commands(episode, since=len(self._episodes[episode].actions))

    def close(self, episode: str) -> None:
        """Ends an episode and drops its outstanding reply; does nothing for a failed episode."""
        if (ended := self._episodes.pop(episode, None)) is not None:
            self._workers[ended.slot].send(Command("close", episode, ended.ticket))

    def poll(self) -> list[Reply]:
        """Returns the replies that have arrived, in order of arrival, which is not deterministic.

        Raises:
            UserError: The replacement of a lost worker cannot start.
        """
        replies, self._early = self._early, []
        for slot, worker in enumerate(self._workers):
            replies += [reply for command, outcome in worker.take() for reply in self._replies(command, outcome)]
            if worker.lost:
                self._replace(slot)
        return replies

    def wait(self, seconds: float) -> list[Reply]:
        """Waits for the first reply, up to a time limit, and returns as `poll` does.

        Returns immediately if no reply is due.
        """
        end = time.monotonic() + seconds
        while not (replies := self.poll()) and any(episode.waits for episode in self._episodes.values()):
            if time.monotonic() >= end:
                break
            busy = [worker for worker in self._workers if worker.is_busy]
            wait_for(
                [worker.channel for worker in busy],
                min([end, *(worker.deadline for worker in busy)]) - time.monotonic(),
            )
        return replies

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _send_commands(self, name: str, since: int = 0) -> None:
        """Sends an episode's commands from index `since` on: 0 opens it, the others are its actions."""
        episode = self._episodes[name]
        worker = self._workers[episode.slot]
        if not worker.is_busy and not worker.channel.silent():  # it died while idle, so no episode fails
            self._replace(episode.slot)
            return
        if since == 0:
            worker.send(Command("open", name, episode.ticket), episode.seed, episode.row)
        for turn, action in enumerate(episode.actions, start=1):
            if turn >= since:
                worker.send(Command("step", name, episode.ticket, turn), action)

    def _replies(self, command: Command, outcome: Observation | Failure) -> list[Reply]:
        """Returns the reply to a command as a list, empty if the episode is closed or the command was a replay."""
        episode = self._episodes.get(command.episode)
        if episode is None or episode.ticket != command.ticket or episode.failure is not None:
            return []
        if isinstance(outcome, Observation):
            mark = digest(outcome)
            if command.turn == len(episode.seen):
                episode.seen.append(mark)
                return [Reply(command.episode, outcome)]
            if mark == episode.seen[command.turn]:
                return []
            outcome = Failure("replay", "its replay gave another observation than the first time")
            self._workers[episode.slot].send(Command("close", command.episode, command.ticket))
        where = f"environment '{self._name}' failed on {episode.label}, turn {command.turn}"
        failure = replace(outcome, message=f"{where}: {outcome.message}")
        if not episode.waits:
            episode.failure = failure
            return []
        del self._episodes[command.episode]
        return [Reply(command.episode, failure=failure)]

    def _replace(self, slot: int) -> None:
        """Replaces a worker; the new one replays the episodes of the old one."""
        self._restart(slot)
        for name, episode in self._episodes.items():
            if episode.slot == slot and episode.failure is None:
                self._send_commands(name)
