"""Whether long answers are taken as often as short ones, where groups are taken as they become whole.

Owns the counts; what is told of them is `observability/off_policy.py`'s. They are integers, and sums in the order of
lengths: the same on every rank, and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from mrl.observability.off_policy import acceptance_metrics, mean_by_length
from mrl.types import SampleTable

WINDOW = 32
"""Steps over which acceptance by length is told."""

QUARTERS = 4


@dataclass
class Acceptance:
    """Of a run, since its schedule was set.

    Attributes:
        taken: Samples, and their tokens, that steps have taken.
        discarded: Samples, and the tokens that they had, of groups that became too old and began again.
        recent: Of each of the last `WINDOW` steps: of each quarter of its samples by length, shortest first, how many
            there are, and how many of them were taken by the step for which they began.
    """

    taken: list[int] = field(default_factory=lambda: [0, 0])
    discarded: list[int] = field(default_factory=lambda: [0, 0])
    recent: list[list[list[float]]] = field(default_factory=list)

    def took(self, num_samples: int, num_tokens: int, lens_N: Tensor, at_once_N: Tensor) -> None:
        """Notes what a step takes.

        Args:
            num_samples: That it takes, samples without a score too.
            num_tokens: Theirs.
            lens_N: Response length of those that it trains on.
            at_once_N: Bool: taken by the step for which they began.
        """
        self.taken = [self.taken[0] + num_samples, self.taken[1] + num_tokens]
        if lens_N.numel():
            self.recent = [*self.recent, by_quarter(lens_N, at_once_N)][-WINDOW:]

    def discards(self, num_samples: int, num_tokens: int) -> None:
        """Notes a group that begins again."""
        self.discarded = [self.discarded[0] + num_samples, self.discarded[1] + num_tokens]

    def quarters(self) -> list[float | None]:
        """Of each quarter, shortest first, the part taken at once in the last `WINDOW` steps; None: no samples."""
        sums = [[sum(step[quarter][at] for step in self.recent) for at in (0, 1)] for quarter in range(QUARTERS)]
        return [at_once / count if count else None for count, at_once in sums]

    def metrics(self, carried: tuple[int, int]) -> dict[str, float]:
        """After a step has taken its groups; `carried`: samples, and their tokens, that stay in flight."""
        begun = [sum(counts) for counts in zip(self.taken, self.discarded, carried, strict=True)]
        return acceptance_metrics(accepted=self.taken, begun=begun, carried=carried, quarters=self.quarters())

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: all of it."""
        return asdict(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> Acceptance:
        """What `state_dict` gave.

        Raises:
            ValueError: It is something else; LookupError and TypeError too.
        """
        recent = [[list(map(float, pair)) for pair in step] for step in state["recent"]]
        if any([len(pair) for pair in step] != [2] * QUARTERS for step in recent):
            raise ValueError(f"a step's acceptance by length is not of {QUARTERS} pairs")
        return Acceptance(_pair(state["taken"]), _pair(state["discarded"]), recent)


def sizes_of(table: SampleTable) -> dict[int, tuple[int, int]]:
    """By uid the samples of each prompt, and their tokens."""
    found: dict[int, tuple[int, int]] = {}
    for uid, length in zip(table["uid"].long().tolist(), table["response_len"].long().tolist(), strict=True):
        count, tokens = found.get(uid, (0, 0))
        found[uid] = count + 1, tokens + length
    return found


def by_quarter(lens_N: Tensor, at_once_N: Tensor) -> list[list[float]]:
    """Of each quarter of the samples by length, shortest first: how many, and how many of them were taken at once.

    Where samples of equal length fall into two quarters, each quarter has the same part of those taken at once.

    Args:
        lens_N: Lengths, N > 0.
        at_once_N: Bool.
    """
    part_N = mean_by_length(lens_N, at_once_N)
    bounds = [(len(part_N) * quarter + QUARTERS - 1) // QUARTERS for quarter in range(QUARTERS + 1)]
    quarters = [part_N[start:end] for start, end in pairwise(bounds)]
    return [[float(len(part)), part.sum().item()] for part in quarters]


def _pair(found: Sequence[Any]) -> list[int]:
    first, second = found
    return [int(first), int(second)]
