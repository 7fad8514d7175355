"""Memory that the ranks of a host share, for what they send each other.

Owns buffers in `/dev/shm`: a sender packs into its own, a receiver reads from there, and no byte goes through a socket.
A buffer's file has no name any more once all have opened it, so that nothing is left of a job however it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")


def create(size: int) -> tuple[Tensor, str]:
    """A new buffer, and the name under which others of the host open it.

    Args:
        size: Bytes.

    Returns:
        (uint8 [size], name); the name is "" where this host has no room for it, and the buffer this process's own.
    """
    path = FOLDER / f"mrl-{uuid.uuid4().hex}"
    if size:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # what is not there would be missed at the first write
                return _mapped(descriptor, size), path.name
            except OSError:
                remove(path.name)
            finally:
                os.close(descriptor)
        except OSError:
            pass
    return torch.empty(size, dtype=torch.uint8), ""


def attach(name: str, size: int) -> Tensor | None:
    """Another rank's buffer [size]; None where this process cannot reach it."""
    if not name:
        return None
    try:
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mapped(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Takes a buffer's name away; who has opened it keeps it."""
    if name:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
