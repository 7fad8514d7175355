"""Tensors of other ranks of the host, read where they lie.

Owns who reads whose, and the sums by which sender and reader compare what was read. A rank's tensors can be read where
all of them lie in memory that it shares (`distributed/shared_memory.py`). The sums of what it gives are in a buffer of
its own, which the readers see: one for each copy, as the rank itself reads its tensors. Between the first and the last
agreement of a transfer (`transfer.py`) no rank changes its tensors.
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
class _Place:
    """Where a tensor lies: in which of its rank's buffers, from which byte on, and how."""

    buffer: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Shown:
    """What a rank lets others read: the buffer of its sums, those of its tensors, and where each tensor lies."""

    sums: shared_memory.Offer
    buffers: tuple[shared_memory.Offer, ...]
    places: dict[str, _Place]


class Neighbours:
    """One rank's view of the other ranks of its host.

    Attributes:
        copies: Of all ranks, those in which one rank reads another's tensors, cut as they are made.
    """

    def __init__(self, copies: Sequence[Copy], sources: Mapping[str, Tensor], rank: int) -> None:
        """Nothing is found yet.

        Args:
            copies: Of all ranks, cut to what is made at a time.
            sources: This rank's tensors.
            rank: This rank.
        """
        self._rank, self._sources = rank, sources
        self._between = [copy for copy in copies if copy.source_rank != copy.target_rank and copy.wire_dtype != FP8]
        self._names = {copy.source_name for copy in self._between if copy.source_rank == rank}
        self._read: dict[int, dict[str, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._shown: _Shown | None = None
        self.copies: list[Copy] = []
        self._slots: dict[Copy, int] = {}

    def find(self, *, show: bool, look: bool) -> None:
        """Collective over the job: shows this rank's tensors, and finds those of others.

        Args:
            show: Others may read them.
            look: This rank reads those of others.
        """
        given = [copy for copy in self._between if copy.source_rank == self._rank]
        own, sums = torch.empty(0, dtype=torch.int64), None
        self._shown = places = self._places() if show and given else None
        if places is not None:
            buffer, sums = shared_memory.create(8 * len(given))
            own = buffer.view(torch.int64)
            self._shown = _Shown(sums, places.buffers, places.places) if sums.file >= 0 else None
        world = dist.get_world_size()
        everyones: list[_Shown | None] = [None] * world
        dist.all_gather_object(everyones, self._shown)
        wanted = {copy.source_rank for copy in self._between if copy.target_rank == self._rank} if look else set()
        self._read, self._sums = {}, {self._rank: own}
        for peer in sorted(wanted):
            self._attach(peer, everyones[peer])
        readers: list[set[int]] = [set() for _ in range(world)]
        dist.all_gather_object(readers, set(self._read))
        if sums is not None:
            sums.withdraw()
        self.copies = [copy for copy in self._between if copy.source_rank in readers[copy.target_rank]]
        counts: dict[int, int] = {}
        self._slots = {}
        for copy in self.copies:
            self._slots[copy] = counts.get(copy.source_rank, 0)
            counts[copy.source_rank] = self._slots[copy] + 1

    def stayed(self) -> bool:
        """Whether this rank's tensors lie where `find` showed them, if it showed any."""
        if self._shown is None:
            return True
        now = self._places()
        return now is not None and (now.buffers, now.places) == (self._shown.buffers, self._shown.places)

    def values(self, copy: Copy) -> Tensor:
        """What another rank's copy reads, in its dtype there."""
        return self._read[copy.source_rank][copy.source_name][slices(copy.source_region)]

    def given(self) -> list[Copy]:
        """Those that read this rank's tensors."""
        return [copy for copy in self.copies if copy.source_rank == self._rank]

    def tell(self, totals: Sequence[Tensor]) -> None:
        """Shows the readers the sums of what they are to have read, in the order of `given`."""
        if totals:
            self._sums[self._rank][: len(totals)] = torch.stack(list(totals))

    def told(self) -> list[tuple[Copy, int]]:
        """What this rank reads of others, with the sums that these told."""
        sums = {peer: told.tolist() for peer, told in self._sums.items()}
        mine = (copy for copy in self.copies if copy.target_rank == self._rank)
        return [(copy, sums[copy.source_rank][self._slots[copy]]) for copy in mine]

    def _places(self) -> _Shown | None:
        """Where this rank's tensors lie, without the sums; None: some lie in memory of its own."""
        buffers: dict[shared_memory.Offer, int] = {}
        places = {}
        for name in sorted(self._names):
            tensor = self._sources[name]
            found = shared_memory.place_of(tensor)
            if found is None:
                return None
            number = buffers.setdefault(found[0], len(buffers))
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            places[name] = _Place(number, found[1], shape, strides, _NAMES[tensor.dtype])
        return _Shown(shared_memory.NOWHERE, tuple(buffers), places)

    def _attach(self, peer: int, shown: _Shown | None) -> None:
        """Maps a rank's buffers; it is not read if one of them cannot be reached."""
        if shown is None:
            return
        sums, *buffers = (shared_memory.attach(offer) for offer in (shown.sums, *shown.buffers))
        if sums is None or any(buffer is None for buffer in buffers):
            return
        self._sums[peer] = sums.view(torch.int64)
        self._read[peer] = {}
        for name, place in shown.places.items():
            buffer, dtype = buffers[place.buffer], DTYPES[place.dtype]
            if buffer is not None:
                values = torch.empty(0, dtype=dtype)
                first = place.first // dtype.itemsize
                self._read[peer][name] = values.set_(buffer.untyped_storage(), first, place.shape, place.strides)
