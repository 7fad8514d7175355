"""What only the ranks that train do, where rollouts have ranks of their own.

Owns the one way in: the others skip it, hear of its errors, and wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mrl.distributed.collectives import together
from mrl.distributed.groups import ProcessGroups


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
