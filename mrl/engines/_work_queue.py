"""What an engine samples while it samples: work that comes in parts, and the word to stop before all is done.

Owns `Feed`, the other side of a streaming call as an engine sees it. Who decides is above the engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.types import Begun, Prompt, Rollout


@dataclass(frozen=True)
class Work:
    """Samples of one prompt that a replica is to take up.

    Attributes:
        prompt: What is asked.
        new: Indices of the samples that begin.
        begun: Samples that go on where they stopped.
    """

    prompt: Prompt
    new: tuple[int, ...]
    begun: tuple[Begun, ...] = ()

    @property
    def num_samples(self) -> int:
        """Sequences that it makes run."""
        return len(self.new) + len(self.begun)


class Feed(ABC):
    """Hands out work and takes what is whole, at logical times.

    A replica calls `pulse` at the start, then once in a number of decode steps, and when it has nothing left to run. So
    what happens at which pulse follows from config and seed alone, never from the clock.

    Attributes:
        most: Samples that a replica may have at a time, for which an engine makes room; the same in all calls of a run,
            so that the room can stay as it is.
    """

    most: int

    @abstractmethod
    def pulse(self, finished: Sequence[Rollout], num_waiting: int) -> Sequence[Work] | None:
        """Collective over all replicas: each calls it equally often, with the same arguments on all ranks of a replica.

        Args:
            finished: Responses that became whole since the last pulse, of this replica.
            num_waiting: Samples that were handed to this replica and for which it has had no room yet.

        Returns:
            What this replica is to sample besides; None: it stops now, and gives back what is begun. A replica of which
            a rank was told to stop samples no more and asks on, with the others, until None comes.
        """
