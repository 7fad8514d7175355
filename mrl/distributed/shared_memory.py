"""Memory that the ranks of a host share.

Owns buffers that live in memory under no name: one rank writes, the others of its host read there, and no byte goes
through a socket. A rank finds another one's buffer by the numbers of its process and of an open file. So nothing is
left of a job, however it ends, and the size of `/dev/shm` is no limit. Also owns how a rank's tensors come to lie in
such a buffer (`share`), and where they then are (`place_of`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes; a storage in a buffer starts at a multiple of it, as torch's own do."""


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


NOWHERE = Offer(0, -1, "", 0)

_shown: dict[int, Offer] = {}
"""First address -> the buffer there, of those in which tensors of this process were put by `share`."""


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
                return _tensor(mmap.mmap(offer.file, size)), offer
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
                return _tensor(mmap.mmap(descriptor, offer.size))
        finally:
            os.close(descriptor)
    return None


def share(tensors: Iterable[Tensor]) -> bool:
    """Moves tensors of the host's memory into one buffer that other ranks can find, values and strides as they are.

    Tensors that look into one storage do so afterwards. Whoever looks into it and is not named keeps the old one, so
    name all of them: parameters, Megatron's buffers, the optimizer's parts. The buffer cannot be resized.

    Returns:
        Whether they were moved: not where the system has no such memory, or no room.
    """
    users: dict[int, list[Tensor]] = {}
    starts: dict[int, int] = {}
    size = 0
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in users:
            starts[storage._cdata] = size
            size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        users.setdefault(storage._cdata, []).append(tensor)
    buffer, offer = create(size)
    if offer.file < 0:
        return False
    for storage_id, sharing in users.items():
        old = sharing[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(old, 0, (old.nbytes(),), (1,))
        buffer[starts[storage_id] : starts[storage_id] + old.nbytes()].copy_(whole)
        for tensor in sharing:
            first = starts[storage_id] // tensor.element_size() + tensor.storage_offset()
            moved = torch.empty(0, dtype=tensor.dtype).set_(
                buffer.untyped_storage(), first, tensor.size(), tensor.stride()
            )
            tensor.data = moved
    address = buffer.data_ptr()
    _shown[address] = offer
    weakref.finalize(buffer.untyped_storage(), _forget, address)
    return True


def place_of(tensor: Tensor) -> tuple[Offer, int] | None:
    """The buffer in which a tensor was put by `share`, and its first byte there; None: it is in none."""
    if tensor.device.type != "cpu":
        return None
    address = tensor.data_ptr()
    for start, offer in _shown.items():
        if start <= address < start + offer.size:
            return offer, address - start
    return None


def _forget(address: int) -> None:
    """No tensor looks into the buffer any more."""
    _shown.pop(address).withdraw()


def _tensor(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
