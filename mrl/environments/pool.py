"""The environments of many episodes, in worker processes, on the one rank that speaks with them.

Owns which worker holds which episode, and when one is replaced. Nothing here waits for an environment unless asked to:
`open` and `send` return at once, and `poll` gives what is there. A worker holds several episodes and lets them answer
one after the other, each under its own clock. One that hangs, dies or cannot be believed is killed with all that it
started; the episode that it was at fails with a cause, and its other episodes are replayed on a new worker from their
recorded actions. What a replay answers must be what was answered before.

    with EnvironmentPool("guess", {}, num_workers=4, time_limit_s=10, memory_limit_mb=1024) as pool:
        pool.open("3.0", seed=7, row={}, label="train.jsonl:4 (uid 3, sample 0)")
        for reply in pool.wait(1.0):
            print(reply.episode, reply.observation or reply.failure)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from mrl.distributed.worker_processes.landlock_seccomp import Confinement
from mrl.distributed.worker_processes.worker_process import wait_for
from mrl.environments._remote import Asked, Failure, Limits, Worker
from mrl.environments._wire import digest
from mrl.environments.base import Action, Observation, Schema
from mrl.errors import UserError

MAX_PROCESSES = 64
"""Of one worker and all that its environments start, at one time."""


MAX_FILE_MB = 1024
"""Largest file that an environment may write, MiB."""


@dataclass(frozen=True)
class Reply:
    """What an episode's environment answered: one for each `open` and each `send`.

    Attributes:
        episode: Its id.
        observation: None where it failed.
        failure: Why; the episode is over then and needs no `close`.
    """

    episode: str
    observation: Observation | None = None
    failure: Failure | None = None


@dataclass
class _Episode:
    """An open episode.

    Attributes:
        label: The sample, for messages.
        seed: See `Environment.reset`.
        row: See `Environment.reset`.
        slot: Its worker.
        ticket: Which of all episodes it is: ids may be used again.
        actions: All that were sent.
        seen: Digest of each observation that was handed out.
        failure: In a replay, when no reply was due: told with the next.
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
        """Whether a reply is due."""
        return len(self.seen) <= len(self.actions)


class EnvironmentPool:
    """Holds the environments of many episodes; see the module."""

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
            name: Of a file in `mrl/environments/`, or a path to code of a user's own.
            kwargs: For the environment's constructor.
            num_workers: So many environments answer at the same time; at least 1.
            time_limit_s: For one answer, s.
            memory_limit_mb: For one worker with its episodes and all that they start, MiB; 0: none.
            max_processes: That one worker and what its episodes start may be at one time; 0: any number.
            network: Environments may make sockets; one with `network = True` may anyway.
            writable: Folders below which they may change files, besides the worker's own folder for temporary ones.

        Raises:
            UserError: The environment cannot be imported or made.
        """
        self._name = name
        places = tuple(str(Path(folder).absolute()) for folder in writable)
        confinement = Confinement(network=network, writable=places, file_mb=MAX_FILE_MB)
        limits = Limits(time_limit_s, memory_limit_mb, max_processes, confinement)
        self._start = partial(Worker, name, dict(kwargs), limits)
        self._workers = [self._start() for _ in range(num_workers)]
        self._episodes: dict[str, _Episode] = {}
        self._tickets = count()
        self._early: list[Reply] = []
        try:
            while starting := [worker for worker in self._workers if worker.pending]:
                self._listen(starting, None)
                for worker in starting:
                    list(worker.take())
        except UserError:
            self.shutdown()
            raise

    @property
    def tools(self) -> list[Schema]:
        """Schemas of the environment's tools, for the chat template."""
        return self._workers[0].tools

    @property
    def unconfined(self) -> list[str]:
        """What environments are not kept from on this machine, though they should be; [] where all limits hold."""
        return self._workers[0].missing

    def open(
        self,
        episode: str,
        seed: int,
        row: Mapping[str, Any],
        label: str = "",
        past: Sequence[tuple[Observation, Action]] = (),
    ) -> None:
        """Begins an episode; its reply is the observation of `reset`, or the one that follows `past`.

        Args:
            episode: An id that no open episode has.
            seed: See `Environment.reset`.
            row: See `Environment.reset`.
            label: The sample, for messages: "train.jsonl:4 (uid 3, sample 0)".
            past: Of an episode that goes on: what was observed, and the action that followed, turn by turn. It is
                replayed, and fails where what it observes differs.
        """
        if episode in self._episodes:
            raise ValueError(f"episode '{episode}' is open")
        held = [sum(other.slot == slot for other in self._episodes.values()) for slot in range(len(self._workers))]
        made = _Episode(label or f"episode {episode}", seed, dict(row), held.index(min(held)), next(self._tickets))
        made.actions = [action for _, action in past]
        made.seen = [digest(observation) for observation, _ in past]
        self._episodes[episode] = made
        self._ask(episode)

    def send(self, episode: str, action: Action) -> None:
        """Gives an episode that has replied its next action."""
        if self._episodes[episode].waits:
            raise ValueError(f"episode '{episode}' has not replied to what came before")
        self._episodes[episode].actions.append(action)
        if (failure := self._episodes[episode].failure) is not None:
            del self._episodes[episode]
            self._early.append(Reply(episode, failure=failure))
        else:
            self._ask(episode, since=len(self._episodes[episode].actions))

    def close(self, episode: str) -> None:
        """Ends an episode, one that has not replied too: no reply of it comes any more. A failed one is closed."""
        if (ended := self._episodes.pop(episode, None)) is not None:
            self._workers[ended.slot].ask(Asked("close", episode, ended.ticket))

    def poll(self) -> list[Reply]:
        """The replies that are there, in the order in which they came: which is another on every day.

        Raises:
            UserError: A worker that had to be replaced does not start again.
        """
        replies, self._early = self._early, []
        for slot, worker in enumerate(self._workers):
            replies += [reply for asked, outcome in worker.take() for reply in self._heard(asked, outcome)]
            if worker.lost:
                self._replace(slot)
        return replies

    def wait(self, seconds: float) -> list[Reply]:
        """Like `poll`, and waits for the first reply, at most so long; returns at once where none is due."""
        end = time.monotonic() + seconds
        while not (replies := self.poll()) and any(episode.waits for episode in self._episodes.values()):
            if time.monotonic() >= end:
                break
            self._listen([worker for worker in self._workers if worker.pending], end)
        return replies

    def shutdown(self) -> None:
        """Ends the workers and all that their environments started."""
        for worker in self._workers:
            worker.channel.release()
        for worker in self._workers:
            worker.channel.stop()

    def __enter__(self) -> EnvironmentPool:
        """Itself; `shutdown` follows at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `shutdown`."""
        self.shutdown()

    def _ask(self, name: str, since: int = 0) -> None:
        """Sends an episode's commands to its worker: 0 opens it, the others are its actions."""
        episode = self._episodes[name]
        worker = self._workers[episode.slot]
        if not worker.pending and not worker.channel.silent():  # it died while idle, and no episode is blamed
            self._replace(episode.slot)
            return
        if since == 0:
            worker.ask(Asked("open", name, episode.ticket), episode.seed, episode.row)
        for turn, action in enumerate(episode.actions, start=1):
            if turn >= since:
                worker.ask(Asked("step", name, episode.ticket, turn), action)

    def _heard(self, asked: Asked, outcome: Observation | Failure) -> list[Reply]:
        """The reply to hand out; none where the episode is closed, or was only replayed."""
        episode = self._episodes.get(asked.episode)
        if episode is None or episode.ticket != asked.ticket or episode.failure is not None:
            return []
        if isinstance(outcome, Observation):
            mark = digest(outcome)
            if asked.turn == len(episode.seen):
                episode.seen.append(mark)
                return [Reply(asked.episode, outcome)]
            if mark == episode.seen[asked.turn]:
                return []
            outcome = Failure("replay", "its replay observed something else than it did the first time")
            self._workers[episode.slot].ask(Asked("close", asked.episode, asked.ticket))
        where = f"environment '{self._name}' failed on {episode.label}, turn {asked.turn}"
        failure = replace(outcome, message=f"{where}: {outcome.message}")
        if not episode.waits:
            episode.failure = failure
            return []
        del self._episodes[asked.episode]
        return [Reply(asked.episode, failure=failure)]

    def _replace(self, slot: int) -> None:
        """A new worker, which replays the episodes of the one before."""
        self._workers[slot].channel.stop()
        self._workers[slot] = self._start()
        for name, episode in self._episodes.items():
            if episode.slot == slot and episode.failure is None:
                self._ask(name)

    def _listen(self, workers: Sequence[Worker], end: float | None) -> None:
        """Until one may have said something, or the first limit has come."""
        ends = [worker.deadline for worker in workers] + ([] if end is None else [end])
        wait_for([worker.channel for worker in workers], min(ends) - time.monotonic())
