"""Counts that show a length bias: whether long responses are consumed as often as short ones with over-sampling.

All values are integers or sums in order of length, so they are equal on every rank and after a resume. The metrics are
in `observability/off_policy.py`.
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
"""Steps in the moving window of acceptance by length."""

QUARTERS = 4


@dataclass
class Acceptance:
    """Counts of consumed and discarded samples since the schedule of the run last changed.

    Attributes:
        taken: [samples, response tokens] that steps consumed.
        discarded: [samples, response tokens] of groups that were restarted because of their age.
        recent: Counts of each of the last `WINDOW` steps and each quarter of its samples by length, shortest first:
            [samples, samples consumed by the first step after their sampling started].
    """

    taken: list[int] = field(default_factory=lambda: [0, 0])
    discarded: list[int] = field(default_factory=lambda: [0, 0])
    recent: list[list[list[float]]] = field(default_factory=list)

    def record_consumed(self, num_samples: int, num_tokens: int, lens_N: Tensor, at_once_N: Tensor) -> None:
        """Counts the samples that a step consumes.

        Args:
            num_samples: Consumed samples, unscored ones included.
            num_tokens: Response tokens of these samples.
            lens_N: Response length of each sample to train on.
            at_once_N: True for samples consumed by the first step after their sampling started, bool.
        """
        self.taken = [self.taken[0] + num_samples, self.taken[1] + num_tokens]
        if lens_N.numel():
            self.recent = [*self.recent, by_quarter(lens_N, at_once_N)][-WINDOW:]

    def record_discarded(self, num_samples: int, num_tokens: int) -> None:
        """Counts the lost samples and tokens of a restarted group."""
        self.discarded = [self.discarded[0] + num_samples, self.discarded[1] + num_tokens]

    def rate_by_quarter(self) -> list[float | None]:
        """Returns the share of samples consumed at once in each quarter by length; None for an empty quarter."""
        sums = [[sum(step[quarter][at] for step in self.recent) for at in (0, 1)] for quarter in range(QUARTERS)]
        return [at_once / count if count else None for count, at_once in sums]

    def metrics(self, carried: tuple[int, int]) -> dict[str, float]:
        """Returns metrics after a step consumed its groups; `carried` is (samples, tokens) left in the buffer."""
        started = [sum(counts) for counts in zip(self.taken, self.discarded, carried, strict=True)]
        return acceptance_metrics(
            accepted=self.taken, started=started, carried=carried, quarters=self.rate_by_quarter()
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all counts, JSON-serializable."""
        return asdict(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> Acceptance:
        """Builds the counts from the result of `state_dict`.

        Raises:
            ValueError: Malformed state; also LookupError and TypeError.
        """
        recent = [[list(map(float, pair)) for pair in step] for step in state["recent"]]
        if any([len(pair) for pair in step] != [2] * QUARTERS for step in recent):
            raise ValueError(f"acceptance.recent has a step without {QUARTERS} pairs of numbers")
        return Acceptance(_pair(state["taken"]), _pair(state["discarded"]), recent)


def sizes_of(table: SampleTable) -> dict[int, tuple[int, int]]:
    """Returns (samples, response tokens) of each prompt, by uid."""
    found: dict[int, tuple[int, int]] = {}
    for uid, length in zip(table["uid"].long().tolist(), table["response_len"].long().tolist(), strict=True):
        count, tokens = found.get(uid, (0, 0))
        found[uid] = count + 1, tokens + length
    return found


def by_quarter(lens_N: Tensor, at_once_N: Tensor) -> list[list[float]]:
    """Returns [samples, samples consumed at once] for each quarter of the samples by length, shortest first.

    Samples of equal length that fall into two quarters are averaged, so the result does not depend on their order.

    Args:
        lens_N: Response lengths, N > 0.
        at_once_N: True for samples consumed at once, bool.
    """
    part_N = mean_by_length(lens_N, at_once_N)
    bounds = [(len(part_N) * quarter + QUARTERS - 1) // QUARTERS for quarter in range(QUARTERS + 1)]
    quarters = [part_N[start:end] for start, end in pairwise(bounds)]
    return [[float(len(part)), part.sum().item()] for part in quarters]


def _pair(found: Sequence[Any]) -> list[int]:
    first, second = found
    return [int(first), int(second)]
