"""What the ranks of a transfer tell each other besides bytes: that one of them failed, or that something is so.

Owns `Work`, a rank's sums and its first failure, and the agreements, which cost one small message each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mrl.distributed.collectives import raise_together


class Work:
    """Sums of what was delivered, and the first failure, after which nothing more is tried."""

    def __init__(self) -> None:
        self.total = 0
        self.error: Exception | None = None

    def attempt(self, action: Callable[..., object], *args: object) -> None:
        """Adds what `action` returns, if that is a sum."""
        if self.error is None:
            try:
                found = action(*args)
                self.total += found if isinstance(found, int) else 0
            except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
                self.error = caught


def any_rank(said: bool) -> bool:
    """Collective over the job: whether any rank says so."""
    flag = torch.tensor([said], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def agree(error: Exception | None) -> None:
    """Collective over the job: `raise_together`, which costs more, only where a rank failed."""
    if any_rank(error is not None):
        raise_together(error)
