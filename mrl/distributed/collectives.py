"""Collectives that torch.distributed lacks: ragged all-gather, deterministic sums, and shared errors.

Every tensor is made contiguous before it is sent: gloo sends wrong bytes for other tensors, without an error.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import UserError, disk_errors


class RankFailedError(RuntimeError):
    """Error that every rank raises if one of them failed.

    Attributes:
        rank: Global rank that failed.
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} failed: {what}")
        self.rank = rank


def world_group() -> dist.ProcessGroup:
    """Returns the default process group: all ranks of the job."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no default process group: call distributed.launch.init_distributed() first")
    return group


def broadcast_from_rank_0(value: Any) -> Any:
    """Collective over all ranks: returns rank 0's value on every rank; plain data only (`safe_pickle.py`)."""
    return broadcast_object(0, value)


def broadcast_object(src: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Collective over `group`: returns global rank `src`'s value everywhere; plain data only (`safe_pickle.py`)."""
    if dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`: returns the elementwise sum on every rank; the input is unchanged."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    all_reduce_(total, group)
    return total


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> None:
    """Collective over `group`: all-reduces in place (default: sum); does nothing in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)


def sum_in_rank_order(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`: returns the elementwise sum with bits that depend neither on the rank nor on the shape.

    Adds the ranks' tensors in rank order in fp32 and rounds once at the end.
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
    """Collective over `group`: concatenates the ranks' rows in rank order.

    Args:
        rows: [n, ...]; n may differ between ranks, dtype and trailing shape may not.
        group: Process group.

    Returns:
        [sum of n, ...].
    """
    size = dist.get_world_size(group)
    if size == 1:
        return rows.detach().clone(memory_format=torch.contiguous_format)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows.size(0)]), group=group)
    max_count = max(int(count) for count in counts)
    if not max_count:
        return rows.new_zeros((0, *rows.shape[1:]))
    padded = rows.new_zeros((max_count, *rows.shape[1:]))
    padded[: rows.size(0)] = rows
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def check_same_on_all_ranks(text: str, has: str, advice: str) -> None:
    """Collective over all ranks: checks that every rank has the text of rank 0.

    Args:
        text: Text to compare, such as names or a fingerprint.
        has: Start of the message after "rank N", such as "reads other training data than rank 0".
        advice: What to do, a sentence.

    Raises:
        UserError: A rank's text differs; on every rank.
    """
    other = _differing_rank(text)
    if other is not None:
        error = UserError(f"rank {other} {has}. {advice}")
        error.on_all_ranks = True
        raise error


def _differing_rank(text: str) -> int | None:
    """Collective over all ranks: returns the first rank whose text is not rank 0's; None if all are equal."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    found = all_gather_ragged(torch.tensor([digest]), world_group()).tolist()
    return next((rank for rank, value in enumerate(found) if value != found[0]), None)


def raise_error_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Collective over `group`: returns if no rank has an error; otherwise every rank raises the first failing rank's.

    Args:
        error: Exception of this rank; None: it succeeded.
        group: Process group; None: all ranks.

    Raises:
        UserError: The first failing rank has a UserError; with the same message.
        RankFailedError: The first failing rank has another exception; the message names the rank and the exception.
    """
    size = dist.get_world_size(group)
    if not any_rank(error is not None, group):  # one byte per rank: a third of the time of gathering messages
        return
    own = None if error is None else (isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error))
    reports: list[tuple[bool, str, str] | None] = [own] * size
    if size > 1:
        dist.all_gather_object(reports, own, group=group)
    for rank, report in enumerate(reports):
        if report is None:
            continue
        is_user_error, described, message = report
        if is_user_error:
            shared = UserError(message)
            shared.on_all_ranks = True
            raise shared from error
        raise RankFailedError(dist.get_global_rank(group or world_group(), rank), described) from error


def any_rank(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Collective over `group`: returns whether `value` is true on any rank."""
    size = dist.get_world_size(group)
    if size == 1:
        return value
    found = [torch.zeros(1, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, torch.tensor([value], dtype=torch.uint8), group=group)
    return any(found)


def call_on_first_rank(group: dist.ProcessGroup, function: Callable[[], Any]) -> Any:
    """Collective over `group`: calls a function on the group's first rank.

    Args:
        group: Process group.
        function: Function that returns plain data (`safe_pickle.py`).

    Returns:
        Its result, on every rank.

    Raises:
        UserError: The function raised it; on every rank.
        RankFailedError: The function raised another exception; on every rank.
    """
    first, value = dist.get_global_rank(group, 0), None
    with raise_on_all_ranks(group):
        if dist.get_rank() == first:
            value = function()
    return broadcast_object(first, value, group)


ALONE_S = 5.0
"""Time within which the other ranks join `raise_error_on_all_ranks`, s; later they are taken to wait in a collective
that the failing rank left."""

_abort_callbacks: list[Callable[[Exception], object]] = []


def set_abort_callback(end: Callable[[Exception], object] | None) -> None:
    """Sets the function, called in a thread, that ends the job with this rank's error; None: the others time out."""
    _abort_callbacks[:] = [] if end is None else [end]


def _abort_alone(error: Exception) -> None:
    for callback in _abort_callbacks:
        callback(error)


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Collective over `group`: an exception that one rank raises inside is raised on all of them.

    Disk errors become UserErrors. The block may contain collectives: if a rank fails while the others wait for it in
    one, they never reach `raise_error_on_all_ranks`, and the watchdog ends the job with the error after ALONE_S.
    """
    try:
        with disk_errors():
            yield
    except Exception as error:  # noqa: BLE001 -- any exception must reach the other ranks
        timer = threading.Timer(ALONE_S, _abort_alone, [error])
        timer.daemon = True
        timer.start()
        try:
            raise_error_on_all_ranks(error, group)
        finally:
            timer.cancel()
    else:
        raise_error_on_all_ranks(None, group)
