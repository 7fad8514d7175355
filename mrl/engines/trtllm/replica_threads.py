"""Work that all ranks of a replica do at the same time, inside calls that cannot be interrupted.

Owns the beat: each rank's work runs in a thread of its own while the ranks meet several times a second, so that a rank
that fails ends the call on all of them with its cause. Those that it leaves waiting inside TensorRT-LLM cannot be
called back; their threads end with the process.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from mrl.errors import UserError

T = TypeVar("T")

BEAT_S = 0.1
"""Longest time between two meetings of the ranks."""


def side_by_side(work: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device) -> T:
    """Collective over `group`: this rank's result, once every rank has one.

    Args:
        work: Of this rank.
        group: Ranks of the replica; None: this rank alone, which works in this thread.
        device: Of this rank.

    Raises:
        RuntimeError: On every rank, where any rank's work failed; the message names the rank and the cause.
        UserError: The same, where that was a mistake of the user.
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
        except Exception as error:  # noqa: BLE001 -- whatever it is, the other ranks must learn of it
            errors.append(error)

    worker = Thread(target=run, daemon=True)
    worker.start()
    while True:
        worker.join(BEAT_S)
        mine = (bool(results), [(isinstance(error, UserError), describe(error)) for error in errors])
        words = [mine] * dist.get_world_size(group)
        dist.all_gather_object(words, mine, group=group)
        cause = errors[0] if errors else None
        for position, (_, failures) in enumerate(words):
            for is_user_error, described in failures:
                if is_user_error:
                    raise UserError(described) from cause
                rank = dist.get_global_rank(group, position)
                raise RuntimeError(f"rank {rank}'s engine failed: {described}") from cause
        if all(done for done, _ in words):
            return results[0]


def describe(error: Exception) -> str:
    """An error in words: a mistake of the user as it is, another one with its type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
