"""Parts of the actor that wait in host memory while the device's room is wanted for something else.

Owns the way of a part's storages to host memory and back. Views stay valid: a storage is emptied and filled again in
place, so parameters, Megatron's buffers and the optimizer's shards need not know. When a part is needed is known to
`actor.py`; `trainer/rollout_worker.py` says when the room is wanted.
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
"""What need not be copied: every update starts by zeroing the gradients."""


@dataclass
class _Away:
    storage: torch.UntypedStorage
    num_bytes: int
    host: Tensor | None


class Offload:
    """Sends parts of an actor away and brings them back; each call does what is left to do.

    Attributes:
        parts: Those that leave the device at all.
    """

    def __init__(self, parts: Collection[Part], device: torch.device) -> None:
        """Nothing leaves yet.

        Args:
            parts: Which may leave.
            device: Where the parts are used; tensors elsewhere are left alone.
        """
        self.parts = tuple(part for part in PARTS if part in parts)
        self._device = device
        self._away: dict[Part, list[_Away]] = {}
        self._hosts: dict[Part, dict[int, Tensor]] = {}

    def release(self, tensors: Callable[[Part], Iterable[Tensor]], *, keep: Collection[Part] = ()) -> None:
        """Empties the storages of all parts but `keep`, after copying what is worth it to host memory.

        Args:
            tensors: The tensors of a part, as they are now. One that shares its storage with a part named earlier in
                `PARTS` belongs to that part.
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

    def bring(self, *parts: Part) -> None:
        """These parts are on the device afterwards, with the values that they left with; gradients with none."""
        for part in parts:
            for item in self._away.pop(part, ()):
                item.storage.resize_(item.num_bytes)
                if item.host is not None:
                    _bytes_of(item.storage, item.num_bytes).copy_(item.host, non_blocking=True)

    def _storages(self, tensors: Callable[[Part], Iterable[Tensor]]) -> dict[Part, list[torch.UntypedStorage]]:
        """Each storage once, under the first part that has it; those that are away already are not among them."""
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

    def _copy_out(self, part: Part, storage: torch.UntypedStorage, hosts: Mapping[int, Tensor]) -> _Away:
        size = storage.nbytes()
        if part in DROPPED:
            return _Away(storage, size, None)
        host = hosts.get(_identity(storage))
        if host is None or host.numel() != size:
            host = pinned(size) if self._device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
        host.copy_(_bytes_of(storage, size), non_blocking=True)
        return _Away(storage, size, host)


def pinned(size: int) -> Tensor:
    """Page-locked host memory of so many bytes and no more; torch's own allocator rounds up to a power of two."""
    host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cuda.cudaHostRegister(host.data_ptr(), size, 0)
    if int(status) != 0:
        raise RuntimeError(f"CUDA locks no {size / 1e9:.1f} GB of host memory for the actor's parts: {status}")
    weakref.finalize(host.untyped_storage(), cuda.cudaHostUnregister, host.data_ptr())
    return host


def pinned_like(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape and dtype in memory of `pinned`, not filled."""
    return pinned(max(tensor.nbytes, 1))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _identity(storage: torch.UntypedStorage) -> int:
    """The same for every tensor that looks into a storage, whether it is empty or not."""
    return int(storage._cdata)


def _bytes_of(storage: torch.UntypedStorage, size: int) -> Tensor:
    """A view of all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
