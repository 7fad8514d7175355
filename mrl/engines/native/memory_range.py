"""Memory that can be given back and taken again at the same addresses.

A captured CUDA graph holds addresses. Where they stay, it outlives an engine that sleeps. On CUDA the driver separates
addresses from memory (cuMemAddressReserve, cuMemCreate, cuMemMap), as sleep modes of vLLM and SGLang use it; where it
does not, memory comes from torch and its address may change, which `addresses` of the model shows. On a CPU the system
drops the pages of a mapping. Tests run the CPU's way and the order of driver calls; no GPU has run this.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from mrl.models.kernels.cuda_memory import AddressRange

ALIGNED = 256
"""Bytes; a tensor in a range starts at a multiple of it."""

HUGE_FROM = 1 << 22
"""Bytes from which a mapping of the host asks for huge pages, as numpy does."""


class MemoryRange:
    """Addresses of one device, with memory behind the first of them or none.

    Tensors of the range must not be read or written while it is released.

    Attributes:
        num_bytes: Size of the range.
        held_bytes: Bytes of memory behind the first addresses; 0: released.
        problem: Why addresses may change; None: they stay.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserves addresses; takes no memory.

        Args:
            num_bytes: Size of the range.
            device: CPU or CUDA.
        """
        self.num_bytes, self.held_bytes = num_bytes, 0
        self.problem: str | None = None
        self._pages: _Pages
        if device.type == "cpu":
            self._pages = _HostPages(num_bytes)
            return
        try:
            self._pages = _DevicePages(num_bytes, device)
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            self.problem = str(error)
            self._pages = _TorchPages(device)

    def take(self, num_bytes: int) -> bool:
        """Holds memory behind the first `num_bytes`. Where fewer were held, all of it is new and zero.

        Returns:
            Whether memory was taken, and zeroed; False where enough was held, whose content stays.
        """
        if num_bytes <= self.held_bytes:
            return False
        self.release()
        self._pages.map(num_bytes)
        self.held_bytes = num_bytes
        return True

    def release(self) -> None:
        """Gives all memory back to the system, also where tensors of the range exist."""
        if self.held_bytes:
            self._pages.unmap()
        self.held_bytes = 0

    def tensor(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor whose data start at byte `first`; its memory must be held."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if first + num_bytes > self.held_bytes:
            raise ValueError(f"bytes up to {first + num_bytes} of a range that holds {self.held_bytes}")
        return self._pages.bytes[first : first + num_bytes].view(dtype).view(shape)


def tensors_in_range(
    wanted: Iterable[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> tuple[MemoryRange, list[Tensor]]:
    """Returns a new range, held, and zeros of these shapes and dtypes in it, one after the other."""
    given = [(torch.Size(shape), dtype) for shape, dtype in wanted]
    sizes = [-(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED for shape, dtype in given]
    firsts = [0, *accumulate(sizes)]
    memory = MemoryRange(firsts[-1], device)
    memory.take(memory.num_bytes)
    parts = zip(firsts, given, strict=False)
    return memory, [memory.tensor(first, shape, dtype) for first, (shape, dtype) in parts]


class _Pages(Protocol):
    bytes: Tensor
    """uint8, from the first address on; at least as long as what is mapped."""

    def map(self, num_bytes: int) -> None:
        """Puts zeroed memory behind the first bytes; nothing is mapped before."""

    def unmap(self) -> None:
        """Takes it away."""


class _HostPages:
    """A mapping of the host's memory, whose pages of zeros come when they are written."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= HUGE_FROM:
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def map(self, num_bytes: int) -> None:
        pass

    def unmap(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)


class _TorchPages:
    """Memory of torch's allocator: a storage that is emptied and filled, perhaps at another address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def map(self, num_bytes: int) -> None:
        storage = self.bytes.untyped_storage()
        storage.resize_(num_bytes)  # tensors of before look into the same storage
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))
        self.bytes.zero_()

    def unmap(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.bytes.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _DevicePages:
    """Addresses that the CUDA driver keeps for the process, and memory that it maps there."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # from here on the process has a CUDA context
        self._device = device
        with torch.cuda.device(device):
            self._range = AddressRange(num_bytes, torch.cuda.current_device())
        self._range.map(1)  # torch asks the driver whose addresses these are
        self.bytes: Tensor = torch.as_tensor(self._range, device=device)
        self._range.unmap()

    def map(self, num_bytes: int) -> None:
        try:
            self._range.map(num_bytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch keeps memory that it does not use
            self._range.map(num_bytes)
        self.bytes[:num_bytes].zero_()

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)  # nothing may use it any more
        self._range.unmap()
