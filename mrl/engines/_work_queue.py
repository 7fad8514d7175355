"""Work queue of `RolloutEngine.generate_streaming`, as an engine sees it. The rollout folder implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.types import PartialRollout, Prompt, Rollout


@dataclass(frozen=True)
class PromptWork:
    """Samples of one prompt that a replica must start or resume.

    Attributes:
        prompt: Prompt of the samples.
        new_indices: Indices of the samples to start.
        partial_rollouts: Partial rollouts to resume.
    """

    prompt: Prompt
    new_indices: tuple[int, ...]
    partial_rollouts: tuple[PartialRollout, ...] = ()

    @property
    def num_samples(self) -> int:
        """Number of sequences to sample: new and resumed ones."""
        return len(self.new_indices) + len(self.partial_rollouts)


class WorkQueue(ABC):
    """Hands out work and receives finished responses, at logical times.

    A replica polls at the start, then once in a fixed number of decode steps, and when no sequence is left to run. What
    happens at which poll therefore follows from config and seed alone, never from the clock.

    Attributes:
        max_samples: Most samples that a replica runs or queues at a time; constant in a run, so that an engine can
            allocate once.
    """

    max_samples: int

    @abstractmethod
    def poll(self, finished: Sequence[Rollout], num_waiting: int) -> Sequence[PromptWork] | None:
        """Collective over all replicas: exchanges finished responses for new work.

        Every replica calls it equally often; all ranks of a replica pass the same arguments. A replica with an abort
        request samples nothing more and polls on with the others until None comes.

        Args:
            finished: Responses of this replica that finished since the last poll.
            num_waiting: Samples handed to this replica that have not started for lack of room.

        Returns:
            Further work for this replica; None: stop now and return the partial rollouts.
        """
