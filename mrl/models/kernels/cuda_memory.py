"""CUDA address ranges whose physical memory can be mapped and unmapped, through the driver's virtual memory management.

Calls libcuda with ctypes (cuda.h, "Virtual Memory Management"; structures as in CUDA 10.2 to 13.5): torch has no such
API, and ctypes needs no compiler.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

PINNED = DEVICE = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE."""

READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

RECOMMENDED = 1
"""CU_MEM_ALLOC_GRANULARITY_RECOMMENDED."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


_held = {"now": 0, "peak": 0}


def peak_bytes() -> int:
    """Returns the most bytes mapped by `AddressRange` in this process since `reset_peak`; torch does not count them."""
    return _held["peak"]


def reset_peak() -> None:
    """Sets the peak to the memory that `AddressRange` objects map now."""
    _held["peak"] = _held["now"]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class AddressRange:
    """Reserved range of virtual addresses on one device, freed with the object.

    torch sees it as a byte array through `__cuda_array_interface__`; it must be mapped when a tensor is created from
    it.

    Attributes:
        address: First address.
        num_bytes: Size, a multiple of the driver's allocation granularity.
    """

    def __init__(self, num_bytes: int, index: int, driver: Any = None) -> None:
        """Reserves the addresses without allocating memory.

        Args:
            num_bytes: Minimum size.
            index: Device index.
            driver: libcuda or an object with its functions; None: libcuda of this machine.

        Raises:
            OSError: There is no CUDA driver.
            RuntimeError: The driver could not reserve the addresses.
        """
        self._driver = driver or _libcuda()
        self._properties = Properties(type=PINNED, location=Location(DEVICE, index))
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), RECOMMENDED)
        self._unit = unit.value
        self.num_bytes = self._rounded(num_bytes)
        address = ctypes.c_ulonglong()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(self.num_bytes), _size(0), _long(0), _long(0))
        self.address = address.value
        self._mapped: list[tuple[int, int]] = []  # size and handle
        end = weakref.finalize(self, _free, self._driver, self.address, self.num_bytes, self._mapped)
        end.atexit = False  # the driver frees all when the process ends

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Array description by which torch creates a tensor on this memory."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def map(self, num_bytes: int) -> None:
        """Allocates uninitialized memory for the first `num_bytes` bytes, none of which may be mapped yet.

        Raises:
            torch.OutOfMemoryError: The device is out of memory.
            RuntimeError: The driver could not map the memory.
        """
        size, handle = self._rounded(num_bytes), ctypes.c_ulonglong()
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(self._properties), _long(0))
        try:
            self._call("cuMemMap", _long(self.address), _size(size), _size(0), handle, _long(0))
        except RuntimeError:
            self._driver.cuMemRelease(handle)
            raise
        self._mapped.append((size, handle.value))
        _held["now"] += size
        _held["peak"] = max(_held.values())
        access = Access(self._properties.location, READ_WRITE)
        try:
            self._call("cuMemSetAccess", _long(self.address), _size(size), ctypes.byref(access), _size(1))
        except RuntimeError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Frees the memory and keeps the addresses; the device must no longer use it."""
        _unmap(self._driver, self.address, self._mapped)

    def _rounded(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // self._unit)) * self._unit

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device is out of memory (CUDA error {status})")
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")


def _unmap(driver: Any, address: int, mapped: list[tuple[int, int]]) -> None:
    while mapped:
        size, handle = mapped.pop()
        _held["now"] -= size
        driver.cuMemUnmap(_long(address), _size(size))
        driver.cuMemRelease(_long(handle))


def _free(driver: Any, address: int, num_bytes: int, mapped: list[tuple[int, int]]) -> None:
    _unmap(driver, address, mapped)
    driver.cuMemAddressFree(_long(address), _size(num_bytes))


_size, _long = ctypes.c_size_t, ctypes.c_ulonglong


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
