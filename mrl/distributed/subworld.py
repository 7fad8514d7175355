"""Some ranks of the job as the whole of it.

Owns `as_whole_job`, groups that only their ranks make (`group_among`), and what keeps the ranks in step about groups
that only some of them made (`level_names`). Ranks
that train have Megatron, and torch's checkpoints, work among themselves: both take the default process group for all
ranks there are, and so do mrl's own collectives over the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mrl.distributed.collectives import everyone


@contextmanager
def as_whole_job(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, on the ranks of `group`, every collective over the job is one over the group.

    Args:
        group: The first ranks of the job, so that their numbers stay; None: the job itself.

    Raises:
        RuntimeError: They are not.
    """
    if group is None:
        yield
        return
    if dist.get_process_group_ranks(group) != list(range(group.size())):
        raise RuntimeError(f"ranks {dist.get_process_group_ranks(group)} are not the first ones of the job")
    whole = everyone()
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(whole)


def group_among(ranks: Sequence[int], name: str, **given: Any) -> Any:
    """Collective over `ranks`: their group, None on other ranks, which take no part.

    torch names such a group after its ranks and the number of groups that there are. One that is made when another has
    gone would have its name, and find the addresses in the store that the other has left.

    Args:
        ranks: Of the job.
        name: The same on all of them, and no other group's ever.
        given: For `dist.new_group`.
    """
    named = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: hashlib.sha256(name.encode()).hexdigest()
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **given)
    finally:
        c10d._hash_ranks_to_str = named


def level_names() -> None:
    """Collective over the job: torch names groups by a count on each rank; after this it is the same on all."""
    count = torch.tensor(c10d._world.group_count)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(count)
