"""Grouping of samples into calls: one call scores a sample, a group, or all samples of a replica.

Also decides which calls of coroutine functions a worker makes concurrently. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mrl.errors import UserError
from mrl.rewards._bound_reward import CallStyle

SAMPLE, GROUP, REPLICA = "sample", "group", "replica"

MAX_CONCURRENT_SAMPLES = 64
"""Number of samples in concurrent calls of a worker; exceeded only by a single larger call."""

Unit = tuple[int, ...]
"""Rows that are scored in one call."""

Order = Sequence[tuple[int, int]]
"""Position of each row: id of the sample's group, and its index in the group."""


@dataclass(frozen=True)
class ScoringTask:
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
class CallBatch:
    """Functions that are called together, with the same samples.

    Attributes:
        calls: Indices of the functions, among the workers' functions.
        scope: SAMPLE, GROUP or REPLICA: the samples of one call.
        is_async: True if calls run concurrently.
    """

    calls: tuple[int, ...]
    scope: str
    is_async: bool

    def units(self, order: Order) -> list[Unit]:
        """Splits all rows into calls; the rows of a call are sorted by `order`."""
        if self.scope == SAMPLE:
            return [(row,) for row in range(len(order))]
        rows = sorted(range(len(order)), key=lambda row: order[row])
        if self.scope == REPLICA:
            return [tuple(rows)] if rows else []
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(order[row][0], []).append(row)
        return [tuple(group) for group in groups.values()]

    def tasks(self, units: Sequence[Unit], num_workers: int) -> list[ScoringTask]:
        """Packs units into tasks; concurrent ones are spread over `num_workers`."""
        if not self.is_async or not units:
            return [ScoringTask(self.calls, (unit,)) for unit in units]
        units_per_task = max(1, MAX_CONCURRENT_SAMPLES // max(map(len, units)))
        size = min(units_per_task, -(-len(units) // num_workers))
        return [ScoringTask(self.calls, tuple(units[start : start + size])) for start in range(0, len(units), size)]


def group_calls(names: Sequence[str], styles: Sequence[CallStyle], batches: Sequence[str | None]) -> list[CallBatch]:
    """Groups the workers' functions by calling style.

    Args:
        names: Names of the functions, for messages.
        styles: Calling style of each function.
        batches: `reward.functions[].batch` of each function.

    Raises:
        UserError: `batch` is set for a function that takes one sample per call.
    """
    members: dict[tuple[str, bool], list[int]] = {}
    for place, (name, style, batch) in enumerate(zip(names, styles, batches, strict=True)):
        check_batch(name, batch, takes_lists=style.takes_lists)
        members.setdefault(((batch or GROUP) if style.takes_lists else SAMPLE, style.is_async), []).append(place)
    return [CallBatch(tuple(places), scope, is_async) for (scope, is_async), places in members.items()]


def check_batch(name: str, batch: str | None, *, takes_lists: bool) -> None:
    """Raises UserError if `batch` is set for a function that takes one sample per call."""
    if batch is not None and not takes_lists:
        raise UserError(
            f"reward.functions: '{name}' has batch={batch}, but takes one sample at a time. Leave batch out, or give "
            "it TRL's parameters (completions ...) or those of verl's batch functions (solution_strs ...)."
        )
