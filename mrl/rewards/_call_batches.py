"""Reward functions that are called alike, and what one call of them is about: a sample, a group, or all samples.

Owns which samples belong into a call, and which calls a worker makes at the same time. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mrl.errors import UserError
from mrl.rewards._call import Way

SAMPLE, GROUP, REPLICA = "sample", "group", "replica"

AT_ONCE = 64
"""Samples of calls that wait at the same time, where a call is not of more."""

Unit = tuple[int, ...]
"""Rows that one call is about."""

Order = Sequence[tuple[int, int]]
"""By row: which group a sample belongs to, and its place there."""


@dataclass(frozen=True)
class Task:
    """What a worker does before it turns to something else.

    Attributes:
        calls: Its functions, by their places among the worker's.
        units: One, or several whose calls wait at the same time.
    """

    calls: tuple[int, ...]
    units: tuple[Unit, ...]

    @cached_property
    def rows(self) -> list[int]:
        """All of its samples; a sample's place in the task is its place here."""
        return [row for unit in self.units for row in unit]

    @cached_property
    def num_rows(self) -> int:
        """How many samples."""
        return sum(map(len, self.units))

    @cached_property
    def num_timed(self) -> int:
        """As many samples' time may pass between two answers."""
        return max(map(len, self.units))


@dataclass(frozen=True)
class Bundle:
    """Functions that are called with the same samples.

    Attributes:
        calls: Their places among the workers'.
        reach: SAMPLE, GROUP or REPLICA.
        waits: Whether several calls are made at the same time.
    """

    calls: tuple[int, ...]
    reach: str
    waits: bool

    def units(self, order: Order) -> list[Unit]:
        """All rows, cut into calls; within a call in the order of `order`."""
        if self.reach == SAMPLE:
            return [(row,) for row in range(len(order))]
        rows = sorted(range(len(order)), key=lambda row: order[row])
        if self.reach == REPLICA:
            return [tuple(rows)] if rows else []
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(order[row][0], []).append(row)
        return [tuple(group) for group in groups.values()]

    def tasks(self, units: Sequence[Unit], num_workers: int) -> list[Task]:
        """The units as tasks."""
        if not self.waits or not units:
            return [Task(self.calls, (unit,)) for unit in units]
        most = max(1, AT_ONCE // max(map(len, units)))
        size = min(most, -(-len(units) // num_workers))
        return [Task(self.calls, tuple(units[start : start + size])) for start in range(0, len(units), size)]


def bundles_of(names: Sequence[str], ways: Sequence[Way], batches: Sequence[str | None]) -> list[Bundle]:
    """The functions of the workers, sorted by how they are called.

    Args:
        names: Of the functions.
        ways: Of each.
        batches: `reward.functions[].batch` of each.

    Raises:
        UserError: A function that takes one sample is to have more.
    """
    members: dict[tuple[str, bool], list[int]] = {}
    for place, (name, way, batch) in enumerate(zip(names, ways, batches, strict=True)):
        check_batch(name, batch, lists=way.lists)
        members.setdefault(((batch or GROUP) if way.lists else SAMPLE, way.waits), []).append(place)
    return [Bundle(tuple(places), reach, waits) for (reach, waits), places in members.items()]


def check_batch(name: str, batch: str | None, *, lists: bool) -> None:
    """Raises UserError where a function that takes one sample is to have more."""
    if batch is not None and not lists:
        raise UserError(
            f"reward.functions: '{name}' has batch={batch}, but takes one sample at a time. Leave batch out, or give "
            "it TRL's parameters (completions ...) or those of verl's batch functions (solution_strs ...)."
        )
