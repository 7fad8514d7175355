"""Memory that can be released and allocated again at the same addresses.

A captured CUDA graph contains addresses; if they stay, it remains valid while the engine sleeps. On CUDA the driver
separates addresses from memory (cuMemAddressReserve, cuMemCreate, cuMemMap), as in the sleep modes of vLLM and SGLang;
if that fails, memory comes from torch and its address may change. On a CPU the operating system drops the pages of a
mapping. Tests cover the CPU and the order of driver calls; not yet run on a GPU.
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
"""Alignment of tensors in a range, bytes."""

HUGE_FROM = 1 << 22
"""Size from which a host mapping requests huge pages, bytes (as in numpy)."""


class MemoryRange:
    """Address range on one device, of which a leading part or nothing is backed by memory.

    Tensors of the range must not be read or written while it is released.

    Attributes:
        num_bytes: Size of the range.
        held_bytes: Bytes backed by memory, from the first address on; 0: released.
        problem: Reason why addresses may change; None: they stay.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserves addresses without memory.

        Args:
            num_bytes: Size of the range.
            device: CPU or CUDA device.
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
        """Backs the first `num_bytes` with memory; if fewer were backed, all of it is new and zero.

        Returns:
            Whether memory was allocated and zeroed; False: enough was backed already, and its content is unchanged.
        """
        if num_bytes <= self.held_bytes:
            return False
        self.release()
        self._pages.map(num_bytes)
        self.held_bytes = num_bytes
        return True

    def release(self) -> None:
        """Returns all memory to the system, even if tensors of the range exist."""
        if self.held_bytes:
            self._pages.unmap()
        self.held_bytes = 0

    def tensor(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the tensor that starts at byte `first`, which must be backed by memory."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if first + num_bytes > self.held_bytes:
            raise ValueError(f"a tensor up to byte {first + num_bytes} exceeds the {self.held_bytes} allocated bytes")
        return self._pages.bytes[first : first + num_bytes].view(dtype).view(shape)


def tensors_in_range(
    wanted: Iterable[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> tuple[MemoryRange, list[Tensor]]:
    """Creates a range and consecutive zero tensors of these shapes and dtypes in it."""
    given = [(torch.Size(shape), dtype) for shape, dtype in wanted]
    sizes = [-(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED for shape, dtype in given]
    firsts = [0, *accumulate(sizes)]
    memory = MemoryRange(firsts[-1], device)
    memory.take(memory.num_bytes)
    parts = zip(firsts, given, strict=False)
    return memory, [memory.tensor(first, shape, dtype) for first, (shape, dtype) in parts]


class _Pages(Protocol):
    bytes: Tensor
    """uint8, from the first address on; at least as long as the mapped part."""

    def map(self, num_bytes: int) -> None:
        """Backs the first `num_bytes` of the address range with zeroed memory; no part of it may be backed yet."""

    def unmap(self) -> None:
        """Releases the memory of the whole range."""


class _HostPages:
    """Anonymous mapping of host memory, whose pages are allocated on the first write."""

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
    """Memory of torch's allocator: a storage that is resized, perhaps at another address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def map(self, num_bytes: int) -> None:
        storage = self.bytes.untyped_storage()
        storage.resize_(num_bytes)  # existing tensors keep the storage
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))
        self.bytes.zero_()

    def unmap(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.bytes.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _DevicePages:
    """Addresses reserved by the CUDA driver, and memory that it maps there."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # creates the CUDA context
        self._device = device
        with torch.cuda.device(device):
            self._range = AddressRange(num_bytes, torch.cuda.current_device())
        self._range.map(1)  # torch queries the driver for the device of these addresses
        self.bytes: Tensor = torch.as_tensor(self._range, device=device)
        self._range.unmap()

    def map(self, num_bytes: int) -> None:
        try:
            self._range.map(num_bytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch caches unused memory
            self._range.map(num_bytes)
        self.bytes[:num_bytes].zero_()

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)  # kernels may still use the memory
        self._range.unmap()
