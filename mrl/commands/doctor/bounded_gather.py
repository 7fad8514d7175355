"""Gathers values on rank 0 with a bound on every wait, for ranks that may be missing or hang.

The protocol runs over the job's key-value store, so it works before and next to a process group. In each stage a rank
reports that it has entered, then its result; rank 0 decides whether the job goes on. A thread ends the process if this
rank itself hangs in a stage.
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
"""Extra delay of the watching thread, since a collective of torch raises at its own time limit with the reason."""
AFTER_RANK_0 = 2.0
"""Factor by which the other ranks wait longer than rank 0, so that rank 0 reports first."""


class MissingRanksError(RuntimeError):
    """Raised on rank 0 if ranks did not answer in time.

    Attributes:
        stage: Name of the stage.
        ranks: Ranks without an answer.
    """

    def __init__(self, stage: str, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks} did not answer in stage {stage}")
        self.stage, self.ranks = stage, ranks


class FailedRanksError(RuntimeError):
    """Raised on rank 0 if ranks failed in a stage.

    Attributes:
        stage: Name of the stage.
        errors: Rank -> its error message.
    """

    def __init__(self, stage: str, errors: Mapping[int, str]) -> None:
        super().__init__(f"stage {stage} failed on ranks {sorted(errors)}")
        self.stage, self.errors = stage, errors


class JobEndedError(RuntimeError):
    """Raised on the other ranks after rank 0 has ended the job and reported why."""


class Deadline:
    """Thread that reports a stage that hangs."""

    def __init__(
        self, timeout_s: float, late: Callable[[str], None], begins: Callable[[str], object] = lambda name: None
    ) -> None:
        """Starts the thread.

        Args:
            timeout_s: Time limit of a stage, s.
            late: Called once, in the thread, with the name of a stage that exceeds its limit.
            begins: Called with the name of each stage when it starts.
        """
        self._timeout_s, self._late, self._begins = timeout_s, late, begins
        self._stage, self._ends = "", float("inf")
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def stage(self, name: str, times: float = 1) -> Iterator[None]:
        """Limits the body to `times` times the time limit; a nested stage suspends the outer limit and has its own."""
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


class BoundedGather:
    """Communication between the ranks over the store; every rank calls the methods in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, deadline: Deadline) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, world_size, timeout_s
        self._deadline = deadline

    def stage(self, name: str, action: Callable[[], Any], times: float = 1) -> list[Any] | None:
        """Collective over the job: runs `action` on each rank and gathers the results on rank 0.

        Args:
            name: Unique name of the stage.
            action: Function that returns a JSON value.
            times: Time limit of the stage, as a multiple of the job's.

        Returns:
            Results in the order of ranks, on rank 0; None on the others.

        Raises:
            MissingRanksError: Ranks did not answer in time (on rank 0).
            FailedRanksError: The action raised on some ranks (on rank 0).
            JobEndedError: Rank 0 ended the job for one of these reasons (on the others).
        """
        self._set(f"{name}/in/{self._rank}", True)
        answer: dict[str, Any] = {}
        try:
            with self._deadline.stage(name, times):
                answer["value"] = action()
        except Exception as error:  # noqa: BLE001 -- rank 0 reports it
            answer["error"] = f"{type(error).__name__}: {first_line(error)}"
        self._set(f"{name}/{self._rank}", answer)
        if self._rank > 0:
            if not self._get(f"{name}/go", AFTER_RANK_0 * times * self._timeout_s + GRACE_S):
                raise JobEndedError
            return None
        try:
            values = self._collect(name, times)
        except (MissingRanksError, FailedRanksError):
            self._set(f"{name}/go", False)
            raise
        self._set(f"{name}/go", True)
        return values

    def broadcast(self, name: str, value: Any) -> Any:
        """Collective over the job: broadcasts the value of rank 0.

        Raises:
            JobEndedError: Rank 0 did not send it in time.
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
            except JobEndedError:
                continue
        absent = [rank for rank in range(self._size) if rank not in answers]
        if absent:
            raise MissingRanksError(name, absent)
        errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if errors:
            raise FailedRanksError(name, errors)
        return [answers[rank]["value"] for rank in range(self._size)]

    def fail(self, name: str, error: str) -> None:
        """Reports an error for this rank, whose `action` hangs, and waits until rank 0 ends the job."""
        self._set(f"{name}/{self._rank}", {"error": error})
        self.broadcast("end", None)

    def give_up(self, name: str, status: int) -> None:
        """Releases the other ranks, which wait for the end of a stage; called on rank 0 after its report."""
        self._set(f"{name}/go", False)
        self.broadcast("end", status)

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise JobEndedError from error  # rank 0, which serves the store, has exited

    def _get(self, key: str, timeout_s: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # timeout, or rank 0, which serves the store, has exited
            raise JobEndedError from error


def reconnect(store: TCPStore) -> TCPStore:
    """Opens a second connection to the store, for a thread: the first connection may be blocked."""
    return TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=GRACE_S))


def ranks_not_entered(store: Store, name: str, world_size: int) -> list[int]:
    """Returns the ranks that have not entered a stage.

    Args:
        store: Store of `BoundedGather`.
        name: Name of the stage.
        world_size: Number of ranks.
    """
    return [rank for rank in range(world_size) if not store.check([f"{name}/in/{rank}"])]
