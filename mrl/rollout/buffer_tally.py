"""What sampling did between two steps, and what a step takes of it.

Owns the plain data that `buffer.py` fills and the loop reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mrl.types import Rollout, SampleTable


@dataclass
class Tally:
    """What sampling did since a step last took its groups; JSON-able but for the table.

    Attributes:
        rounds: Times that it ran.
        dropped: Groups with nothing to learn from.
        restarted: Groups that were too old.
        whole: (uid, source, data set) of each prompt that became whole.
        notes: What people should hear.
        drawn: The table of these prompts, samples without a score too; None: there are none.
    """

    rounds: int = 0
    dropped: int = 0
    restarted: int = 0
    whole: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drawn: SampleTable | None = None

    @property
    def sources(self) -> dict[int, str]:
        """Where each prompt came from, by uid."""
        return {uid: source for uid, source, _ in self.whole}

    @property
    def names(self) -> dict[int, str]:
        """The data set of each prompt, by uid."""
        return {uid: name for uid, _, name in self.whole}


@dataclass(frozen=True)
class Taken:
    """What a step trains on.

    Attributes:
        rollouts: Samples that this rank's replica has, maybe some that are not in the table.
        table: All samples.
        names: uid -> data set.
        tally: Of the time since the step before.
        num_carried: Groups that stay in flight with samples.
        carried: Their samples with a token, and the tokens of these.
    """

    rollouts: list[Rollout]
    table: SampleTable
    names: dict[int, str]
    tally: Tally
    num_carried: int
    carried: tuple[int, int]
