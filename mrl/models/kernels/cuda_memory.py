"""Addresses of a CUDA device, and memory that is mapped there and taken away again, by functions of the driver.

The functions are those of CUDA's virtual memory management (cuda.h, "Virtual Memory Management"; structures as of CUDA
10.2 to 13.5). Torch has no call for it, and ctypes needs no compiler.
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
    """Returns the most memory that ranges of this process had at a time since `reset_peak`; torch does not count it."""
    return _held["peak"]


def reset_peak() -> None:
    """Lets `peak_bytes` count from what is held now."""
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
    """A range of addresses of one device that stays this process's own until the object dies.

    It shows itself to torch as an array of bytes, which must have memory when torch is given it.

    Attributes:
        address: First address.
        num_bytes: Size, a multiple of the driver's unit.
    """

    def __init__(self, num_bytes: int, index: int, driver: Any = None) -> None:
        """Reserves the addresses; takes no memory.

        Args:
            num_bytes: At least so many.
            index: Number of the device.
            driver: libcuda, or what has its functions; None: this machine's.

        Raises:
            OSError: There is no driver.
            RuntimeError: It reserves no addresses.
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
        """Tells torch where the bytes are."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def map(self, num_bytes: int) -> None:
        """Puts memory behind the first bytes, with any content; nothing is mapped there before.

        Raises:
            torch.OutOfMemoryError: The device has no room.
            RuntimeError: The driver does not map it.
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
        """Takes the memory away; the device must have finished with it."""
        _unmap(self._driver, self.address, self._mapped)

    def _rounded(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // self._unit)) * self._unit

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no room (CUDA error {status})")
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
