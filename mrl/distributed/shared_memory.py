"""Host memory that the ranks of a host share, without sockets and without names in `/dev/shm`.

A rank opens another one's buffer by process id and file descriptor (`/proc/PID/fd/N` of a memfd). Nothing is left when
the job ends, however it ends, and the size of `/dev/shm` is no limit. `share` moves existing tensors into a buffer,
`shared_location` finds them there.
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
"""Alignment of storages in a buffer, bytes; torch's own."""


@dataclass(frozen=True)
class SharedBufferHandle:
    """Address of a buffer for other processes of the host.

    Attributes:
        process: Process id of the owner.
        file: File descriptor in that process; -1: the buffer is not shared.
        token: Random name that distinguishes the file from one with the same numbers in another container.
        size: Size of the buffer, bytes.
    """

    process: int
    file: int
    token: str
    size: int

    def close(self) -> None:
        """Closes the owner's descriptor: nobody can attach any more; existing mappings stay valid."""
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)


NO_BUFFER = SharedBufferHandle(0, -1, "", 0)

_shared_buffers: dict[int, SharedBufferHandle] = {}
"""First address -> offer of a buffer that contains tensors moved by `share`."""


def create_buffer(size: int, *, share: bool = True) -> tuple[Tensor, SharedBufferHandle]:
    """Allocates a buffer and its offer; the buffer is private if the system has no memfd or no space.

    Args:
        size: Size, bytes.
        share: Try to make it shared.

    Returns:
        (uint8 [size], offer).
    """
    if share and size and hasattr(os, "memfd_create"):
        token = f"mrl-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            offer = SharedBufferHandle(os.getpid(), os.memfd_create(token), token, size)
            try:
                os.posix_fallocate(offer.file, 0, size)  # otherwise lack of memory kills at the first write
                return _tensor(mmap.mmap(offer.file, size)), offer
            except OSError:
                offer.close()
    return torch.empty(size, dtype=torch.uint8), SharedBufferHandle(os.getpid(), -1, "", size)


def attach(offer: SharedBufferHandle) -> Tensor | None:
    """Returns another rank's buffer, uint8 [size]; None if this process cannot open it."""
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
    """Moves CPU tensors into one shared buffer, with their values and strides.

    Tensors that share a storage still do so afterwards, if all of them are passed; others keep the old storage. So pass
    all of them: parameters, Megatron's buffers, the optimizer's state. The buffer cannot be resized.

    Returns:
        Whether they were moved; False if the system has no memfd or no space.
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
    buffer, offer = create_buffer(size)
    if offer.file < 0:
        return False
    for storage_id, sharing in users.items():
        old = sharing[0].untyped_storage()
        old_bytes = torch.empty(0, dtype=torch.uint8).set_(old, 0, (old.nbytes(),), (1,))
        buffer[starts[storage_id] : starts[storage_id] + old.nbytes()].copy_(old_bytes)
        for tensor in sharing:
            first = starts[storage_id] // tensor.element_size() + tensor.storage_offset()
            moved = torch.empty(0, dtype=tensor.dtype).set_(
                buffer.untyped_storage(), first, tensor.size(), tensor.stride()
            )
            tensor.data = moved
    address = buffer.data_ptr()
    _shared_buffers[address] = offer
    weakref.finalize(buffer.untyped_storage(), _forget, address)
    return True


def shared_location(tensor: Tensor) -> tuple[SharedBufferHandle, int] | None:
    """Returns (offer, byte offset) of a tensor in a buffer of `share`; None if it is in none."""
    if tensor.device.type != "cpu":
        return None
    address = tensor.data_ptr()
    for start, offer in _shared_buffers.items():
        if start <= address < start + offer.size:
            return offer, address - start
    return None


def _forget(address: int) -> None:
    _shared_buffers.pop(address).close()


def _tensor(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
