"""Multi-turn client: the interface between an engine and the environments, in token ids only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.types import FinishReason

SequenceKey = tuple[int, int]
"""Index of the prompt in the call, and sample index."""


@dataclass(frozen=True)
class FinishedTurn:
    """A sequence that ended its turn.

    Attributes:
        prompt_index: Index of its prompt in the call.
        sample_index: Index of the sample, 0 .. n-1.
        ids: Token ids sampled in this turn, the end token included.
        finish_reason: Why it stopped; "length": there is no room for another token.
    """

    prompt_index: int
    sample_index: int
    ids: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def key(self) -> SequenceKey:
        """Identifies the sequence in a call."""
        return self.prompt_index, self.sample_index


class MultiTurnClient(ABC):
    """Answers sequences that ended their turn. All ranks of a replica make the same calls in the same order."""

    @abstractmethod
    def submit(self, turn: FinishedTurn) -> None:
        """Submits a sequence and returns at once."""

    def poll(self) -> None:  # noqa: B027 -- optional: clients without background work have nothing to poll
        """Polls for replies and returns at once. Engines call it between decode steps; it does not affect sampling."""

    @abstractmethod
    def wait_for_replies(self, keys: Sequence[SequenceKey]) -> list[Sequence[int] | None]:
        """Collective over the replica: waits for the replies to these sequences, all of them submitted.

        Returns:
            Token ids to append to each sequence, at least one; None: the episode is over.
        """


def check_reply(ids: Sequence[int], length: int, limit: int) -> Sequence[int]:
    """Returns the token ids of a reply unchanged.

    Args:
        ids: Token ids of the reply.
        length: Response tokens before it.
        limit: Most response tokens of an episode.

    Raises:
        RuntimeError: The reply is empty, or leaves no room for another token.
    """
    if not ids or length + len(ids) >= limit:
        raise RuntimeError(
            f"the environment replied with {len(ids)} tokens after {length} response tokens: at least 1 token and less "
            f"than {limit} in total are allowed"
        )
    return ids
