"""Concurrent, uninterruptible engine calls on all ranks of a replica.

Each rank runs its call in a thread while the ranks exchange their status several times a second, so that a failure on
one rank raises on all of them with its cause. Threads of other ranks that wait inside TensorRT-LLM cannot be cancelled;
they end with the process.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from mrl.errors import UserError

T = TypeVar("T")

EXCHANGE_INTERVAL_S = 0.1
"""Interval between status exchanges, seconds."""


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """Collective over `group`: returns this rank's result once every rank has one.

    Args:
        work: Call to run on this rank.
        group: Ranks of the replica; None: a single rank, which runs the call in this thread.
        device: Device of this rank.

    Raises:
        RuntimeError: The call failed on some rank; raised on every rank with the failed rank and the cause.
        UserError: Same, where the cause is a user error.
    """
    if group is None or dist.get_world_size(group) == 1:
        return work()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            results.append(work())
        except Exception as error:  # noqa: BLE001 -- every error must reach the other ranks
            errors.append(error)

    worker = Thread(target=run, daemon=True)
    worker.start()
    while True:
        worker.join(EXCHANGE_INTERVAL_S)
        own = (bool(results), [(isinstance(error, UserError), describe(error)) for error in errors])
        statuses = [own] * dist.get_world_size(group)
        dist.all_gather_object(statuses, own, group=group)
        cause = errors[0] if errors else None
        for position, (_, failures) in enumerate(statuses):
            for is_user_error, message in failures:
                if is_user_error:
                    raise UserError(message) from cause
                rank = dist.get_global_rank(group, position)
                raise RuntimeError(f"rank {rank}'s engine failed: {message}") from cause
        if all(done for done, _ in statuses):
            return results[0]


def describe(error: Exception) -> str:
    """Returns an error as text: a user error unchanged, others with their type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
