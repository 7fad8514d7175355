"""Grouping of samples into calls: one call scores a sample, a group, or all samples of a replica.

Also decides which calls of coroutine functions a worker makes concurrently. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mrl.errors import UserError
from mrl.rewards._call import Way

SAMPLE, GROUP, REPLICA = "sample", "group", "replica"

AT_ONCE = 64
"""Number of samples in concurrent calls of a worker; exceeded only by a single larger call."""

Unit = tuple[int, ...]
"""Rows that are scored in one call."""

Order = Sequence[tuple[int, int]]
"""Position of each row: id of the sample's group, and its index in the group."""


@dataclass(frozen=True)
class Task:
    """Unit of work of a worker: one call, or several concurrent calls of coroutine functions.

    Attributes:
        calls: Indices of the functions to call, among the worker's functions.
        units: Samples of each call.
    """

    calls: tuple[int, ...]
    units: tuple[Unit, ...]

    @cached_property
    def rows(self) -> list[int]:
        """Rows of all samples, in order; messages refer to a sample by its index in this list."""
        return [row for unit in self.units for row in unit]

    @cached_property
    def num_rows(self) -> int:
        """Number of samples."""
        return sum(map(len, self.units))

    @cached_property
    def num_timed(self) -> int:
        """Size of the largest call: the time limit between two answers is that of so many samples."""
        return max(map(len, self.units))


@dataclass(frozen=True)
class Bundle:
    """Functions that are called together, with the same samples.

    Attributes:
        calls: Indices of the functions, among the workers' functions.
        reach: SAMPLE, GROUP or REPLICA: the samples of one call.
        waits: True if calls run concurrently.
    """

    calls: tuple[int, ...]
    reach: str
    waits: bool

    def units(self, order: Order) -> list[Unit]:
        """Splits all rows into calls; the rows of a call are sorted by `order`."""
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
        """Packs units into tasks; concurrent ones are spread over `num_workers`."""
        if not self.waits or not units:
            return [Task(self.calls, (unit,)) for unit in units]
        most = max(1, AT_ONCE // max(map(len, units)))
        size = min(most, -(-len(units) // num_workers))
        return [Task(self.calls, tuple(units[start : start + size])) for start in range(0, len(units), size)]


def bundles_of(names: Sequence[str], ways: Sequence[Way], batches: Sequence[str | None]) -> list[Bundle]:
    """Groups the workers' functions by calling style.

    Args:
        names: Names of the functions, for messages.
        ways: Calling style of each function.
        batches: `reward.functions[].batch` of each function.

    Raises:
        UserError: `batch` is set for a function that takes one sample per call.
    """
    members: dict[tuple[str, bool], list[int]] = {}
    for place, (name, way, batch) in enumerate(zip(names, ways, batches, strict=True)):
        check_batch(name, batch, lists=way.lists)
        members.setdefault(((batch or GROUP) if way.lists else SAMPLE, way.waits), []).append(place)
    return [Bundle(tuple(places), reach, waits) for (reach, waits), places in members.items()]


def check_batch(name: str, batch: str | None, *, lists: bool) -> None:
    """Raises UserError if `batch` is set for a function that takes one sample per call."""
    if batch is not None and not lists:
        raise UserError(
            f"reward.functions: '{name}' has batch={batch}, but takes one sample at a time. Leave batch out, or give "
            "it TRL's parameters (completions ...) or those of verl's batch functions (solution_strs ...)."
        )
