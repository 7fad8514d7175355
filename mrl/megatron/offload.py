"""Offloading of parts of the actor to host memory while the device's memory is needed for something else.

Views stay valid: a storage is freed and refilled in place, so parameters, Megatron's buffers and the optimizer's shards
need not be changed. `actor.py` loads parts when needed; `trainer/rollout_worker.py` decides when to offload.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
DROPPED: tuple[Part, ...] = ("gradients",)
"""Parts that are freed without a copy: every update starts by zeroing the gradients."""


@dataclass
class _Offloaded:
    storage: torch.UntypedStorage
    num_bytes: int
    host: Tensor | None


class Offload:
    """Moves parts of an actor to host memory and back; calls for parts that are already there do nothing.

    Attributes:
        parts: Parts that may be offloaded.
    """

    def __init__(self, parts: Collection[Part], device: torch.device) -> None:
        """Stores the settings; nothing is offloaded yet.

        Args:
            parts: Parts that may be offloaded.
            device: Device on which the parts are used; tensors on other devices are ignored.
        """
        self.parts = tuple(part for part in PARTS if part in parts)
        self._device = device
        self._away: dict[Part, list[_Offloaded]] = {}
        self._hosts: dict[Part, dict[int, Tensor]] = {}

    def offload(self, tensors: Callable[[Part], Iterable[Tensor]], *, keep: Collection[Part] = ()) -> None:
        """Frees the storages of all parts except `keep`, after copying them to host memory.

        Args:
            tensors: Function that returns the current tensors of a part. A tensor that shares its storage with an
                earlier part of `PARTS` belongs to that part.
            keep: Parts that stay.
        """
        leaving = [part for part in self.parts if part not in keep and part not in self._away]
        if not leaving:
            return
        storages = self._storages(tensors)
        for part in leaving:
            known = self._hosts.get(part, {})
            away = [self._copy_out(part, storage, known) for storage in storages[part]]
            self._hosts[part] = {_identity(item.storage): item.host for item in away if item.host is not None}
            self._away[part] = away
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for part in leaving:
            for item in self._away[part]:
                item.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, *parts: Part) -> None:
        """Moves these parts back to the device with their values; gradients are allocated but not filled."""
        for part in parts:
            for item in self._away.pop(part, ()):
                item.storage.resize_(item.num_bytes)
                if item.host is not None:
                    _bytes_of(item.storage, item.num_bytes).copy_(item.host, non_blocking=True)

    def _storages(self, tensors: Callable[[Part], Iterable[Tensor]]) -> dict[Part, list[torch.UntypedStorage]]:
        """Returns each storage once, under the first part that has it, without those already offloaded."""
        seen: set[int] = set()
        found: dict[Part, list[torch.UntypedStorage]] = {}
        for part in PARTS:
            found[part] = []
            seen.update(_identity(item.storage) for item in self._away.get(part, ()))
            for tensor in tensors(part) if part not in self._away else ():
                storage = tensor.untyped_storage()
                if tensor.device.type == self._device.type and _identity(storage) not in seen and storage.nbytes():
                    found[part].append(storage)
                seen.add(_identity(storage))
        return found

    def _copy_out(self, part: Part, storage: torch.UntypedStorage, hosts: Mapping[int, Tensor]) -> _Offloaded:
        size = storage.nbytes()
        if part in DROPPED:
            return _Offloaded(storage, size, None)
        host = hosts.get(_identity(storage))
        if host is None or host.numel() != size:
            host = pinned(size) if self._device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
        host.copy_(_bytes_of(storage, size), non_blocking=True)
        return _Offloaded(storage, size, host)


def pinned(size: int) -> Tensor:
    """Allocates exactly `size` bytes of page-locked host memory; torch's allocator rounds up to a power of two."""
    host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cuda.cudaHostRegister(host.data_ptr(), size, 0)
    if int(status) != 0:
        raise RuntimeError(f"CUDA cannot lock {size / 1e9:.1f} GB of host memory for offloading the actor: {status}")
    weakref.finalize(host.untyped_storage(), cuda.cudaHostUnregister, host.data_ptr())
    return host


def pinned_like(tensor: Tensor) -> Tensor:
    """Allocates a contiguous tensor of the same shape and dtype in `pinned` memory, not filled."""
    return pinned(max(tensor.nbytes, 1))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _identity(storage: torch.UntypedStorage) -> int:
    """Returns an id of a storage, the same for all of its tensors and whether it is freed or not."""
    return int(storage._cdata)


def _bytes_of(storage: torch.UntypedStorage, size: int) -> Tensor:
    """Returns a view of the complete storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
