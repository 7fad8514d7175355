"""Exchanges between ranks that torch.distributed has no single call for.

Owns ragged all-gather and all-to-all, sums over a group, and errors that all ranks raise together. Every tensor that is
sent is made contiguous first: gloo moves wrong bytes otherwise, without an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import UserError, disk_errors


class RankFailedError(RuntimeError):
    """What all ranks raise together where one of them failed.

    Attributes:
        rank: Of the job, which one.
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} failed: {what}")
        self.rank = rank


def everyone() -> dist.ProcessGroup:
    """The group of all ranks of the job."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group: distributed.launch.start was not called")
    return group


def from_first_rank(value: Any) -> Any:
    """Collective over the job: rank 0's value, on every rank; plain data (`safe_pickle.py`)."""
    return from_rank(0, value)


def from_rank(source: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Collective over `group`: returns the value of rank `source` of the job on every rank.

    Values are plain data (`safe_pickle.py`).
    """
    if dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`: the elementwise sum, on every rank; the input is unchanged."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    reduce(total, group)
    return total


def reduce(tensor: Tensor, group: dist.ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> None:
    """Collective over `group`: the elementwise sum, or another reduction, in place; a rank alone is not held up."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)


def sum_in_rank_order(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`: the elementwise sum, the same bits wherever and how many numbers are summed.

    It begins with the first rank's numbers, adds those of the next to it, and so on, in fp32, rounded once at the end.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return partial
    parts = [torch.empty_like(partial, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, partial.contiguous(), group=group)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(partial.dtype)


def all_gather_ragged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`: the ranks' rows, one rank after the other.

    Args:
        rows: [n, ...] with any n on each rank; dtype and trailing shape are the same everywhere.
        group: Who takes part.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return rows.detach().clone(memory_format=torch.contiguous_format)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows.size(0)]), group=group)
    most = max(int(count) for count in counts)
    if not most:
        return rows.new_zeros((0, *rows.shape[1:]))
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.size(0)] = rows
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def all_to_all_ragged(
    parts: Sequence[Tensor], receive_counts: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Collective over `group`: sends `parts[r]` to rank r and returns what the ranks sent, in rank order.

    Args:
        parts: One 1-D tensor for each rank, the same dtype everywhere.
        receive_counts: Elements that each rank sends to this one; all ranks know these beforehand.
        group: Who takes part; None: the whole job.
    """
    if len(parts) == 1:
        return parts[0].clone()
    received = parts[0].new_empty(sum(receive_counts))
    dist.all_to_all_single(
        received,
        torch.cat(list(parts)).contiguous(),
        list(receive_counts),
        [part.numel() for part in parts],
        group=group,
    )
    return received


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Collective over `group`: returns if no rank has an error; else every rank raises the first failing rank's.

    Raises:
        UserError: The first failing rank has a UserError; the message is its message.
        RankFailedError: It has another exception; the message names the rank and the exception.
    """
    size = dist.get_world_size(group)
    if not any_rank(error is not None, group):  # messages of any length take three times as long
        return
    mine = None if error is None else (isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error))
    found: list[tuple[bool, str, str] | None] = [mine] * size
    if size > 1:
        dist.all_gather_object(found, mine, group=group)
    for rank, item in enumerate(found):
        if item is None:
            continue
        is_user_error, described, message = item
        if is_user_error:
            together = UserError(message)
            together.everywhere = True
            raise together from error
        raise RankFailedError(dist.get_global_rank(group or everyone(), rank), described) from error


def any_rank(said: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Collective over `group`: whether any of its ranks says so."""
    size = dist.get_world_size(group)
    if size == 1:
        return said
    found = [torch.zeros(1, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, torch.tensor([said], dtype=torch.uint8), group=group)
    return any(found)


ALONE_S = 5.0
"""The other ranks hear of an error within this time, or they wait in a collective that the failing rank has left."""

_watch: list[Callable[[Exception], object]] = []


def when_alone(end: Callable[[Exception], object] | None) -> None:
    """What ends the job by an error of this rank, called in a thread; None: nobody can, the others time out."""
    _watch[:] = [] if end is None else [end]


def _end_alone(error: Exception) -> None:
    for end in _watch:
        end(error)


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Collective over `group`: what raises inside on one rank raises on all, by `raise_together`.

    What a disk does not take is a UserError. Inside there may be collectives: where a rank fails and the others wait
    for it in one, so that they do not come to hear of it, the watchdog ends the job with the error after ALONE_S.
    """
    try:
        with disk_errors():
            yield
    except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks must learn of it
        timer = threading.Timer(ALONE_S, _end_alone, [error])
        timer.daemon = True
        timer.start()
        try:
            raise_together(error, group)
        finally:
            timer.cancel()
    else:
        raise_together(None, group)
