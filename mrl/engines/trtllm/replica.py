"""Calls led by the first rank of a replica, whose result or failure reaches all of its ranks.

The ranks exchange their status several times a second, so that a failed part of the engine ends the call on all ranks,
and no rank waits longer than the process group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.errors import UserError

T = TypeVar("T")

EXCHANGE_INTERVAL_S = 0.1
"""Interval between status exchanges, seconds."""


@dataclass(frozen=True)
class _RankStatus:
    """Status of a rank in an exchange."""

    failure: str | None = None
    is_user_error: bool = False
    ended: bool = False
    stop: bool = False
    result: Any = None


class Replica:
    """Ranks that share one engine.

    Attributes:
        size: Number of ranks.
        rank: Position of this rank in the replica; rank 0 leads.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Reads size and rank from the process group.

        Args:
            group: Process group of the replica; None: this rank alone.
        """
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @property
    def first_rank(self) -> int:
        """Global rank of the leader."""
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def call(
        self,
        work: Callable[[], Generator[None, None, T]],
        *,
        check: Callable[[], None],
        abort_requested: Callable[[], bool],
        abort_result: T,
    ) -> T:
        """Collective over the replica: runs `work` on the leader and returns its result on every rank.

        Args:
            work: Generator function that runs on the leader only and yields at least every `EXCHANGE_INTERVAL_S`.
            check: Function that raises where this rank's part of the engine died; called in every exchange.
            abort_requested: Function that returns whether this rank received a stop request.
            abort_result: Return value where any rank received a stop request.

        Raises:
            RuntimeError: The work or a rank's part of the engine failed; raised on every rank.
            UserError: Same, where the cause is a user error.
        """
        running = work() if self.rank == 0 else None
        while True:
            own, error = self._advance(running, check, abort_requested)
            statuses = self._gather(own)
            if running is not None and any(status.stop or status.failure is not None for status in statuses):
                running.close()
            self._raise_failure(statuses, error)
            if any(status.stop for status in statuses):
                return abort_result
            if statuses[0].ended:
                result: T = statuses[0].result
                return result

    def barrier(self, check: Callable[[], None]) -> None:
        """Collective over the replica: waits until every rank has arrived and its `check` passed.

        Raises:
            RuntimeError: A rank's part of the engine died; raised on every rank.
        """
        try:
            check()
            own, error = _RankStatus(), None
        except RuntimeError as dead:
            own, error = _RankStatus(failure=str(dead)), dead
        self._raise_failure(self._gather(own), error)

    def _raise_failure(self, statuses: list[_RankStatus], error: Exception | None) -> None:
        """Raises the first rank's failure, if any, chained to this rank's own `error`."""
        for rank, status in enumerate(statuses):
            if status.failure is not None:
                if status.is_user_error:
                    raise UserError(status.failure) from error
                raise RuntimeError(
                    f"rank {self.first_rank + rank}'s part of the engine failed: {status.failure}"
                ) from error

    def _advance(
        self, running: Generator[None, None, Any] | None, check: Callable[[], None], abort_requested: Callable[[], bool]
    ) -> tuple[_RankStatus, Exception | None]:
        try:
            if running is None:
                time.sleep(EXCHANGE_INTERVAL_S / 2)
            else:
                next(running)
            check()
        except StopIteration as end:
            return _RankStatus(ended=True, result=end.value), None
        except UserError as error:
            return _RankStatus(failure=str(error), is_user_error=True), error
        except Exception as error:  # noqa: BLE001 -- every error must reach the other ranks
            return _RankStatus(failure=f"{type(error).__name__}: {error}"), error
        return _RankStatus(stop=abort_requested()), None

    def _gather(self, own: _RankStatus) -> list[_RankStatus]:
        if self._group is None or self.size == 1:
            return [own]
        statuses: list[_RankStatus] = [own] * self.size
        dist.all_gather_object(statuses, own, group=self._group)
        return statuses
