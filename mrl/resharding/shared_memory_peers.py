"""Reads of other ranks' tensors in shared memory of the host, without messages, and the checksums that verify them.

A rank's tensors can be read if all of them lie in shared memory (`distributed/shared_memory.py`). The rank publishes
the sums of the elements that others read in a shared buffer: one sum per copy, computed from its own tensors. No rank
changes its tensors between the first and the last agreement of a transfer (`transfer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed import shared_memory
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.regions import slices

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _TensorLocation:
    """Location of a tensor in a rank's shared buffers.

    Attributes:
        buffer: Index of the buffer.
        first: Offset of the first element in the buffer, bytes.
        shape: Shape of the tensor.
        strides: Strides of the tensor, elements.
        dtype: Name of the dtype, as layouts spell it.
    """

    buffer: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _SharedTensors:
    """The shared buffers of a rank: its checksums, its tensors, and the location of each tensor."""

    sums: shared_memory.SharedBufferHandle
    buffers: tuple[shared_memory.SharedBufferHandle, ...]
    locations: dict[str, _TensorLocation]


class SharedMemoryPeers:
    """Tensors of other ranks of the host that this rank can read, and the exchange of their checksums.

    Attributes:
        copies: The copies of all ranks whose receiver reads the sender's tensor in shared memory.
    """

    def __init__(self, copies: Sequence[Copy], sources: Mapping[str, Tensor], rank: int) -> None:
        """Selects the copies that may use shared memory; `exchange` then decides which ones do.

        Args:
            copies: Copies of all ranks, already split.
            sources: This rank's tensors.
            rank: Global rank of this process.
        """
        self._rank, self._sources = rank, sources
        self._between = [copy for copy in copies if copy.source_rank != copy.target_rank and copy.wire_dtype != FP8]
        self._names = {copy.source_name for copy in self._between if copy.source_rank == rank}
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._shared: _SharedTensors | None = None
        self.copies: list[Copy] = []
        self._slots: dict[Copy, int] = {}

    def exchange(self, *, share: bool, read: bool) -> None:
        """Collective over the job: publishes this rank's tensors and maps those of the peers it reads.

        Args:
            share: Let other ranks read this rank's tensors.
            read: Read other ranks' tensors.
        """
        exported = [copy for copy in self._between if copy.source_rank == self._rank]
        own, sums = torch.empty(0, dtype=torch.int64), None
        self._shared = located = self._locate() if share and exported else None
        if located is not None:
            buffer, sums = shared_memory.create_buffer(8 * len(exported))
            own = buffer.view(torch.int64)
            self._shared = _SharedTensors(sums, located.buffers, located.locations) if sums.file >= 0 else None
        world = dist.get_world_size()
        all_shared: list[_SharedTensors | None] = [None] * world
        dist.all_gather_object(all_shared, self._shared)
        wanted = {copy.source_rank for copy in self._between if copy.target_rank == self._rank} if read else set()
        self._tensors, self._sums = {}, {self._rank: own}
        for peer in sorted(wanted):
            self._attach(peer, all_shared[peer])
        readers: list[set[int]] = [set() for _ in range(world)]
        dist.all_gather_object(readers, set(self._tensors))
        if sums is not None:
            sums.close()
        self.copies = [copy for copy in self._between if copy.source_rank in readers[copy.target_rank]]
        counts: dict[int, int] = {}
        self._slots = {}
        for copy in self.copies:
            self._slots[copy] = counts.get(copy.source_rank, 0)
            counts[copy.source_rank] = self._slots[copy] + 1

    def is_unchanged(self) -> bool:
        """Returns whether this rank's tensors are still at the locations that `exchange` published."""
        if self._shared is None:
            return True
        now = self._locate()
        return now is not None and (now.buffers, now.locations) == (self._shared.buffers, self._shared.locations)

    def peer_view(self, copy: Copy) -> Tensor:
        """Returns a view of the source region of a copy in the peer's tensor, in the peer's dtype."""
        return self._tensors[copy.source_rank][copy.source_name][slices(copy.source_region)]

    def exported_copies(self) -> list[Copy]:
        """Returns the copies in which another rank reads this rank's tensors."""
        return [copy for copy in self.copies if copy.source_rank == self._rank]

    def publish_sums(self, totals: Sequence[Tensor]) -> None:
        """Writes the sums of the elements that peers read to the shared buffer, in the order of `exported_copies`."""
        if totals:
            self._sums[self._rank][: len(totals)] = torch.stack(list(totals))

    def peer_sums(self) -> list[tuple[Copy, int]]:
        """Returns each copy that this rank reads from a peer, with the sum that the peer published."""
        sums = {peer: buffer.tolist() for peer, buffer in self._sums.items()}
        own = (copy for copy in self.copies if copy.target_rank == self._rank)
        return [(copy, sums[copy.source_rank][self._slots[copy]]) for copy in own]

    def _locate(self) -> _SharedTensors | None:
        """Returns the locations of this rank's tensors, without checksums; None if one is not in shared memory."""
        buffers: dict[shared_memory.SharedBufferHandle, int] = {}
        locations = {}
        for name in sorted(self._names):
            tensor = self._sources[name]
            found = shared_memory.shared_location(tensor)
            if found is None:
                return None
            number = buffers.setdefault(found[0], len(buffers))
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            locations[name] = _TensorLocation(number, found[1], shape, strides, _NAMES[tensor.dtype])
        return _SharedTensors(shared_memory.NO_BUFFER, tuple(buffers), locations)

    def _attach(self, peer: int, shared: _SharedTensors | None) -> None:
        """Maps a peer's buffers. If one of them cannot be mapped, the peer's tensors are not read."""
        if shared is None:
            return
        sums, *buffers = (shared_memory.attach(offer) for offer in (shared.sums, *shared.buffers))
        if sums is None or any(buffer is None for buffer in buffers):
            return
        self._sums[peer] = sums.view(torch.int64)
        self._tensors[peer] = {}
        for name, location in shared.locations.items():
            buffer, dtype = buffers[location.buffer], DTYPES[location.dtype]
            if buffer is not None:
                values = torch.empty(0, dtype=dtype)
                first = location.first // dtype.itemsize
                self._tensors[peer][name] = values.set_(
                    buffer.untyped_storage(), first, location.shape, location.strides
                )
