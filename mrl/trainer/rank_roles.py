"""What only ranks of one kind do, where rollouts have ranks of their own.

Owns the ways in: the others skip it, hear of its errors, and wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from mrl.distributed.collectives import from_rank, together
from mrl.distributed.groups import ProcessGroups

T = TypeVar("T")


@contextmanager
def on_trainers(groups: ProcessGroups) -> Iterator[bool]:
    """Collective over the job: gives whether this rank has a part in what is inside.

    There the ranks that train are the whole job for whatever asks. What raises on one of them raises on all ranks.
    """
    if groups.trainers is None:
        yield True
        return
    with together(), groups.among_trainers() if groups.trains else nullcontext():
        yield groups.trains


def of_samplers(groups: ProcessGroups, value: T) -> T:
    """Collective over the job: what the first rank that samples has, where rank 0, which logs, is none; plain data."""
    if groups.samplers is None:
        return value
    found: T = from_rank(groups.grid.samplers.start, value)
    return found
