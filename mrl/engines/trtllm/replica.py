"""The ranks of one replica while its first rank leads a call: they learn its result, or who failed and why.

Owns the beat: every rank of the replica meets the others several times a second, so that a rank whose part of the
engine died ends the call on all of them, and none waits longer than the process group allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.errors import UserError

T = TypeVar("T")

BEAT_S = 0.1
"""Between two meetings of the ranks."""


@dataclass(frozen=True)
class _Word:
    """What a rank says in a meeting."""

    failure: str | None = None
    is_user_error: bool = False
    ended: bool = False
    stop: bool = False
    result: Any = None


class Replica:
    """The ranks that hold one engine together.

    Attributes:
        size: Ranks of the replica.
        rank: Position in it; 0 leads.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Args: group: The ranks; None: this one alone."""
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
        told_to_stop: Callable[[], bool],
        stopped: T,
    ) -> T:
        """Collective over the replica: what the leader's `work` returns, on every rank.

        Args:
            work: Runs on the leader alone; it yields at least every `BEAT_S`.
            check: Raises where this rank's part of the engine has died; asked in every beat.
            told_to_stop: Whether this rank was told to stop.
            stopped: Returned where any rank was.

        Raises:
            RuntimeError: On every rank, where the work or a rank's part of the engine failed.
            UserError: The same, where that was a mistake of the user.
        """
        running = work() if self.rank == 0 else None
        while True:
            mine, error = self._say(running, check, told_to_stop)
            words = self._meet(mine)
            if running is not None and any(word.stop or word.failure is not None for word in words):
                running.close()
            self._raise_failure(words, error)
            if any(word.stop for word in words):
                return stopped
            if words[0].ended:
                result: T = words[0].result
                return result

    def meet(self, check: Callable[[], None]) -> None:
        """Collective over the replica: returns when every rank has come here and its `check` did not raise.

        Raises:
            RuntimeError: On every rank, where any rank's part of the engine has died.
        """
        try:
            check()
            mine, error = _Word(), None
        except RuntimeError as dead:
            mine, error = _Word(failure=str(dead)), dead
        self._raise_failure(self._meet(mine), error)

    def _raise_failure(self, words: list[_Word], error: Exception | None) -> None:
        """Raises the first rank's failure, if there is one; `error` is this rank's own."""
        for rank, word in enumerate(words):
            if word.failure is not None:
                if word.is_user_error:
                    raise UserError(word.failure) from error
                raise RuntimeError(
                    f"rank {self.first_rank + rank}'s part of the engine failed: {word.failure}"
                ) from error

    def _say(
        self, running: Generator[None, None, Any] | None, check: Callable[[], None], told_to_stop: Callable[[], bool]
    ) -> tuple[_Word, Exception | None]:
        try:
            if running is None:
                time.sleep(BEAT_S / 2)
            else:
                next(running)
            check()
        except StopIteration as end:
            return _Word(ended=True, result=end.value), None
        except UserError as error:
            return _Word(failure=str(error), is_user_error=True), error
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks must learn of it
            return _Word(failure=f"{type(error).__name__}: {error}"), error
        return _Word(stop=told_to_stop()), None

    def _meet(self, mine: _Word) -> list[_Word]:
        if self._group is None or self.size == 1:
            return [mine]
        words: list[_Word] = [mine] * self.size
        dist.all_gather_object(words, mine, group=self._group)
        return words
