"""Limits on how far sampling runs ahead of the updates, derived from the config.

The keys are `train.mode`, `train.max_off_policy_steps`, `rollout.over_sample_rate` and `rollout.over_age`. Imports no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mrl.config.config import Config


@dataclass(frozen=True)
class RolloutSchedule:
    """Limits on sampling ahead of the updates; see `buffer.py` for their use.

    Attributes:
        batch_size: Groups that a step consumes.
        num_samples: Samples of a group.
        lead: Steps by which sampling may be ahead of the updates; 0 is synchronous.
        extra: Prompts sampled beyond a batch (over-sampling).
        max_age: Maximum age of a token in training steps: between the weights that sampled it and the weights that it
            updates; None: no limit.
        waits: True to wait for a group that would exceed `max_age`, False to restart it.
        num_steps: Steps of the run; None if unknown.
        by_parts: True if sampling may stop with partial groups.
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
    def of(config: Config) -> RolloutSchedule:
        """Derives the schedule from the config."""
        train, rollout, age = config.train, config.rollout, max_off_policy_steps(config)
        lead = (age or 0) if train.mode == "async" else 0
        extra = math.ceil(Fraction(str(rollout.over_sample_rate)) * train.batch_size)
        return RolloutSchedule(
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
    def max_in_flight(self) -> int:
        """Maximum number of groups in the rollout buffer."""
        return (self.lead + 1) * self.batch_size + self.extra

    @property
    def target_complete(self) -> int:
        """Complete groups in the buffer that sampling waits for while an update runs concurrently.

        These are the next step's batch and half of the later batches. The other half may be unfinished, so that no step
        waits for the longest responses of all.
        """
        return self.batch_size + (self.lead - 1) * self.batch_size // 2

    @property
    def min_per_update(self) -> int:
        """Groups to complete during each update at least, even with a full stock, so that sampling never idles."""
        return max(1, self.batch_size // 2)

    @property
    def in_order(self) -> bool:
        """True if groups are consumed in prompt order, False for order of completion."""
        return not self.extra

    @property
    def is_off_policy(self) -> bool:
        """True if a token may be sampled by older weights than those it updates."""
        return self.lead > 0 or self.extra > 0


def max_off_policy_steps(config: Config) -> int | None:
    """Returns `train.max_off_policy_steps` with its default applied; None means no limit."""
    given = config.train.max_off_policy_steps
    if given is not None or config.rollout.over_sample_rate:
        return given
    return 1 if config.train.mode == "async" else 0
