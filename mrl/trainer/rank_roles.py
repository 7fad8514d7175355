"""Work of only the ranks that train, or only those that sample, with `rollout.num_ranks` > 0.

The other ranks skip the work, wait for it, and raise its errors too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from mrl.distributed.collectives import broadcast_object, raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups

T = TypeVar("T")


@contextmanager
def on_trainers(groups: ProcessGroups) -> Iterator[bool]:
    """Collective over the job: yields whether this rank trains, and so takes part in the body of the `with`.

    In the body, the default process group contains only the ranks that train. An error on one rank raises on all ranks.
    """
    if groups.trainers is None:
        yield True
        return
    with raise_on_all_ranks(), groups.trainers_as_world() if groups.is_trainer else nullcontext():
        yield groups.is_trainer


def broadcast_from_sampler(groups: ProcessGroups, value: T) -> T:
    """Collective over the job: returns the value of the first rank that samples; `value` must be plain data."""
    if groups.samplers is None:
        return value
    found: T = broadcast_object(groups.grid.samplers.start, value)
    return found
