"""Subsets of ranks that act as the default process group, and groups that only their members create.

Megatron, torch's distributed checkpoints and mrl's own collectives over all ranks use the default process group. In a
disaggregated run the training ranks use them among themselves (`use_as_world`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mrl.distributed.collectives import world_group


@contextmanager
def use_as_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes `group` torch's default process group inside a `with` block; call it on the ranks of the group.

    Args:
        group: Group of the first ranks of the job, so that rank numbers do not change; None: changes nothing.

    Raises:
        RuntimeError: The group's ranks are not the first ones.
    """
    if group is None:
        yield
        return
    if dist.get_process_group_ranks(group) != list(range(group.size())):
        raise RuntimeError(f"ranks {dist.get_process_group_ranks(group)} are not the first ones of the job")
    previous = world_group()
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(previous)


def new_subgroup(ranks: Sequence[int], name: str, **given: Any) -> Any:
    """Collective over `ranks` only: creates their group and returns it.

    torch names such a group after its ranks and the current number of groups. A group created after another one was
    destroyed would get the same name and read the stale addresses in the store, so the name is given here.

    Args:
        ranks: Global ranks.
        name: Name, equal on all members and never used before.
        given: Keyword arguments for `dist.new_group`.
    """
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: hashlib.sha256(name.encode()).hexdigest()
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **given)
    finally:
        c10d._hash_ranks_to_str = original


def sync_group_counter() -> None:
    """Collective over all ranks: makes torch's group counter, from which it derives group names, equal on all ranks."""
    count = torch.tensor(c10d._world.group_count)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(count)
