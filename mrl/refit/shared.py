"""Memory that the ranks of a host share, for what they send each other.

Owns buffers that live in memory under no name: a sender packs into its own, a receiver reads from there, and no byte
goes through a socket. A rank finds another one's buffer by the numbers of its process and of an open file, which is
closed when all have found it. So nothing is left of a job, however it ends, and the size of `/dev/shm` is no limit.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Offer:
    """Where others find a buffer.

    Attributes:
        process: Whose.
        file: The number of its open file; -1: the buffer is not shared.
        token: Tells it from a file of that number in another container's process of that number.
        size: Bytes.
    """

    process: int
    file: int
    token: str
    size: int

    def withdraw(self) -> None:
        """From here on nobody finds the buffer; who has found it keeps it. The owner calls it."""
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)


def create(size: int, *, share: bool = True) -> tuple[Tensor, Offer]:
    """A new buffer, and where others of the host find it; it is this process's own where the system has no such memory.

    Args:
        size: Bytes.
        share: Others may find it.

    Returns:
        (uint8 [size], offer).
    """
    if share and size and hasattr(os, "memfd_create"):
        token = f"mrl-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            offer = Offer(os.getpid(), os.memfd_create(token), token, size)
            try:
                os.posix_fallocate(offer.file, 0, size)  # what is not there would be missed at the first write
                return _mapped(offer.file, size), offer
            except OSError:
                offer.withdraw()
    return torch.empty(size, dtype=torch.uint8), Offer(os.getpid(), -1, "", size)


def attach(offer: Offer) -> Tensor | None:
    """Another rank's buffer; None where this process cannot reach it."""
    if offer.file < 0:
        return None
    place = f"/proc/{int(offer.process)}/fd/{int(offer.file)}"
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            if offer.token in os.readlink(f"/proc/self/fd/{descriptor}"):
                return _mapped(descriptor, offer.size)
        finally:
            os.close(descriptor)
    return None


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
