"""Ranks that may not come: values gathered on rank 0 and told to all, every wait bounded.

Owns the protocol over the job's store, before and beside a process group: a stage is entered, done and answered by each
rank; rank 0 decides whether all go on. A stage in which this process itself hangs is ended by a thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from mrl.errors import first_line

POLL_S = 0.05
GRACE_S = 5.0
"""A collective of torch ends by its own time limit and names the reason; the thread comes this much later."""
AFTER_RANK_0 = 2.0
"""The other ranks wait this many times as long, so that rank 0 speaks first."""


class AbsentError(RuntimeError):
    """Ranks that gave no answer in time.

    Attributes:
        stage: In which stage.
        ranks: Which.
    """

    def __init__(self, stage: str, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks} gave no answer in stage {stage}")
        self.stage, self.ranks = stage, ranks


class FailedError(RuntimeError):
    """Ranks that failed in a stage.

    Attributes:
        stage: In which stage.
        errors: Rank -> what it says.
    """

    def __init__(self, stage: str, errors: Mapping[int, str]) -> None:
        super().__init__(f"stage {stage} failed on ranks {sorted(errors)}")
        self.stage, self.errors = stage, errors


class EndedError(RuntimeError):
    """Rank 0 has ended the job, and says why."""


class Deadline:
    """A thread that ends a stage that hangs."""

    def __init__(
        self, timeout_s: float, late: Callable[[str], None], begins: Callable[[str], object] = lambda name: None
    ) -> None:
        """Starts the thread.

        Args:
            timeout_s: Time limit of a stage, s.
            late: Called in the thread, once, with the name of a stage that exceeds its limit.
            begins: Called with the name of each stage when it starts.
        """
        self._timeout_s, self._late, self._begins = timeout_s, late, begins
        self._stage, self._ends = "", float("inf")
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def stage(self, name: str, times: float = 1) -> Iterator[None]:
        """Inside, `name` has so many times its time; a stage inside of a stage has its own."""
        self._begins(name)
        outer = self._stage, self._ends
        self._stage, self._ends = name, time.monotonic() + times * self._timeout_s
        try:
            yield
        finally:
            self._stage, self._ends = outer

    def _watch(self) -> None:
        while True:
            if time.monotonic() > self._ends:
                self._late(self._stage)
                return
            time.sleep(POLL_S)


class Meeting:
    """The ranks of a job over their store; every rank holds one and calls each method in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, deadline: Deadline) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, world_size, timeout_s
        self._deadline = deadline

    def stage(self, name: str, action: Callable[[], Any], times: float = 1) -> list[Any] | None:
        """Collective over the job: runs `action` on each rank.

        Args:
            name: Of the stage, once in a job.
            action: Returns something that JSON holds.
            times: The time limit, as a multiple of the job's.

        Returns:
            What it returned on each rank, on rank 0; None on the others.

        Raises:
            AbsentError: On rank 0: ranks gave no answer in time.
            FailedError: On rank 0: the action raised on some ranks.
            EndedError: On the others, after either.
        """
        self._set(f"{name}/in/{self._rank}", True)
        answer: dict[str, Any] = {}
        try:
            with self._deadline.stage(name, times):
                answer["value"] = action()
        except Exception as error:  # noqa: BLE001 -- rank 0 tells it
            answer["error"] = f"{type(error).__name__}: {first_line(error)}"
        self._set(f"{name}/{self._rank}", answer)
        if self._rank > 0:
            if not self._get(f"{name}/go", AFTER_RANK_0 * times * self._timeout_s + GRACE_S):
                raise EndedError
            return None
        try:
            values = self._collect(name, times)
        except (AbsentError, FailedError):
            self._set(f"{name}/go", False)
            raise
        self._set(f"{name}/go", True)
        return values

    def tell(self, name: str, value: Any) -> Any:
        """Collective over the job: the value of rank 0, on every rank.

        Raises:
            EndedError: Rank 0 tells nothing.
        """
        if self._rank == 0:
            self._set(f"{name}/told", value)
            return value
        return self._get(f"{name}/told", AFTER_RANK_0 * self._timeout_s)

    def _collect(self, name: str, times: float) -> list[Any]:
        ends = time.monotonic() + times * self._timeout_s
        answers: dict[int, Any] = {}
        for rank in range(self._size):
            try:
                answers[rank] = self._get(f"{name}/{rank}", max(POLL_S, ends - time.monotonic()))
            except EndedError:
                continue
        absent = [rank for rank in range(self._size) if rank not in answers]
        if absent:
            raise AbsentError(name, absent)
        errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if errors:
            raise FailedError(name, errors)
        return [answers[rank]["value"] for rank in range(self._size)]

    def fail(self, name: str, error: str) -> None:
        """Answers for this rank, whose `action` hangs, and returns when rank 0 has said why the job ends."""
        self._set(f"{name}/{self._rank}", {"error": error})
        self.tell("end", None)

    def give_up(self, name: str, status: int) -> None:
        """On rank 0, after it has said why: the others, who wait for the end of a stage, leave."""
        self._set(f"{name}/go", False)
        self.tell("end", status)

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise EndedError from error  # rank 0 has gone, and its store with it

    def _get(self, key: str, timeout_s: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # no such key in time, or no store any more
            raise EndedError from error


def reconnect(store: TCPStore) -> TCPStore:
    """The same store over a connection of its own, for another thread: one may hang in the first."""
    return TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=GRACE_S))


def not_entered(store: Store, name: str, world_size: int) -> list[int]:
    """Ranks that have not come to a stage.

    Args:
        store: `Meeting`'s.
        name: Of the stage.
        world_size: Ranks.
    """
    return [rank for rank in range(world_size) if not store.check([f"{name}/in/{rank}"])]
