"""How far sampling may run ahead of the updates, and beyond a batch, as a config says it.

Owns what `train.mode`, `train.max_off_policy_steps`, `rollout.over_sample_rate` and `rollout.over_age` mean together.
It imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mrl.config.config import Config


@dataclass(frozen=True)
class Schedule:
    """Of a run.

    Attributes:
        batch_size: Groups that a step takes.
        num_samples: Samples of a group.
        lead: Steps that sampling may be ahead of the updates; 0: none.
        extra: Prompts begun beyond a batch.
        max_age: Steps by which weights that sampled a token may be older than those it trains; None: any number.
        waits: Sampling waits for a group that would become older; else it begins again.
        num_steps: Of the run, where its end is known.
        by_parts: Sampling may stop before all that was begun is whole.
    """

    batch_size: int
    num_samples: int
    lead: int = 0
    extra: int = 0
    max_age: int | None = 0
    waits: bool = True
    num_steps: int | None = None
    by_parts: bool = False

    @staticmethod
    def of(config: Config) -> Schedule:
        """The run's."""
        train, rollout, age = config.train, config.rollout, max_off_policy_steps(config)
        lead = (age or 0) if train.mode == "async" else 0
        extra = math.ceil(Fraction(str(rollout.over_sample_rate)) * train.batch_size)
        return Schedule(
            batch_size=train.batch_size,
            num_samples=rollout.n,
            lead=lead,
            extra=extra,
            max_age=age,
            waits=rollout.over_age == "wait",
            num_steps=train.num_steps,
            by_parts=(lead > 1 and not rollout.multi_turn.enable) or extra > 0,
        )

    @property
    def most_in_flight(self) -> int:
        """Groups that are in flight at a time, at most."""
        return (self.lead + 1) * self.batch_size + self.extra

    @property
    def stock(self) -> int:
        """Groups in flight that are to be whole before sampling beside an update stops.

        The next step's, and half of the later ones: the other half may be unfinished, so that none waits for the
        longest answers of all. A step takes a batch, so that as many become whole in each, on average.
        """
        return self.batch_size + (self.lead - 1) * self.batch_size // 2

    @property
    def pace(self) -> int:
        """Groups that are to become whole, besides, whatever is there already: no update runs with nothing sampled."""
        return max(1, self.batch_size // 2)

    @property
    def in_order(self) -> bool:
        """Whether groups are taken in the order of their prompts, not as they become whole."""
        return not self.extra

    @property
    def is_off_policy(self) -> bool:
        """Whether a token may be older than the weights that it trains."""
        return self.lead > 0 or self.extra > 0


def max_off_policy_steps(config: Config) -> int | None:
    """`train.max_off_policy_steps`, or what it is where it is null; None: no bound."""
    given = config.train.max_off_policy_steps
    if given is not None or config.rollout.over_sample_rate:
        return given
    return 1 if config.train.mode == "async" else 0
