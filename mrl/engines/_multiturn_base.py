"""What an engine asks when a sequence stops, and how it is answered.

Owns `Talk`, the other side of a conversation as an engine sees it: token ids alone. Who answers is above the engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.types import FinishReason

Key = tuple[int, int]
"""Place of the prompt in the call, and sample index."""


@dataclass(frozen=True)
class Stopped:
    """A sequence that stopped sampling.

    Attributes:
        place: Of its prompt in the call.
        sample_index: Which of its samples.
        ids: Sampled since it began or was last answered, the end token included.
        finish_reason: Why it stopped; "length": there is no room for another token.
    """

    place: int
    sample_index: int
    ids: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def key(self) -> Key:
        """Names the sequence."""
        return self.place, self.sample_index


class Talk(ABC):
    """Answers sequences that stopped. All ranks of a replica ask and hear the same, in the same order."""

    @abstractmethod
    def ask(self, stopped: Stopped) -> None:
        """Hands a sequence over and returns at once."""

    def hear(self) -> None:  # noqa: B027 -- one that has nobody to hear need not
        """Takes in what has come, and returns at once; called between decode steps, and changes nothing of them."""

    @abstractmethod
    def answers(self, keys: Sequence[Key]) -> list[Sequence[int] | None]:
        """Collective over the replica: waits for the answers to these, each asked before.

        Returns:
            For each the ids to append, after which it samples on, at least one; None: the conversation is over.
        """


def check_answer(ids: Sequence[int], length: int, limit: int) -> Sequence[int]:
    """The ids as they are.

    Args:
        ids: Of an answer.
        length: Response tokens before it.
        limit: Response tokens at most.

    Raises:
        RuntimeError: There are none, or no room for a token after them.
    """
    if not ids or length + len(ids) >= limit:
        raise RuntimeError(f"an answer of {len(ids)} tokens after {length} came, where {limit} is the most")
    return ids
