"""Fills the tensors of a target file from a source, one after another, and checks that all values are finite.

While one tensor is written, a thread reads and casts the next one, so at most two are in memory. A tensor whose bytes
are stored in the source as the target needs them is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import Source
from mrl.errors import UserError
from mrl.resharding.copy_op import num_bytes
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout, StoredTensor
from mrl.resharding.regions import full_region, slices, split, translate

_AHEAD_MIN_BYTES = 1 << 18
"""Size below which handing a tensor to a thread costs more than filling it."""

_AHEAD_MAX_BYTES = 256 << 20
"""Size above which a second buffer costs more memory than the overlap is worth."""

PART_ELEMENTS = 8 << 20
"""Elements read from the source at a time."""

_ROW_ELEMENTS = 1024
_CHUNK_ROWS = 4096


class Filler:
    """Fills the tensors of layouts in two reused buffers, since fresh memory costs more than a copy.

    Attributes:
        not_finite: Tensor -> number of its infinite or NaN values, for the last layout; tensors without any are
            omitted.
    """

    def __init__(self, source: Source, *, allow_nan: bool) -> None:
        """Stores the source, without reading it.

        Args:
            source: Source checkpoint.
            allow_nan: True to count infinite and NaN values instead of raising.
        """
        self._source = source
        self._allow_nan = allow_nan
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self.not_finite: dict[str, int] = {}

    def fill(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) in the order of the layout; a tensor is overwritten once the next one was requested.

        Raises:
            UserError: The source cannot be read, or a value is not finite.
        """
        self.not_finite = {}
        items = list(layout.items())
        self._reserve(max((num_bytes(stored) for stored in layout.values()), default=0))
        with ThreadPoolExecutor(1) as thread, torch.no_grad():
            ahead: Future[Tensor] | None = None
            slot = 0
            for number, (name, stored) in enumerate(items):
                tensor = ahead.result() if ahead is not None else self._fill(name, stored, slot)
                ahead = None
                if number + 1 < len(items) and _worth_a_thread(stored) and _worth_a_thread(items[number + 1][1]):
                    slot = 1 - slot
                    ahead = thread.submit(self._fill, *items[number + 1], slot)
                yield name, tensor
                del tensor

    def _fill(self, name: str, stored: StoredTensor, slot: int) -> Tensor:
        tensor = self._as_it_lies(stored)
        if tensor is None:
            tensor = self._buffer(stored, slot)
            for region in stored.padding:
                tensor[slices(region)] = 0
            for piece in stored.pieces:
                for part in split(piece.src, PART_ELEMENTS):
                    target = translate(part, piece.src, piece.dst)
                    self._source.copy_into(tensor[slices(target)], piece.hf_name, part)
        count = count_not_finite(tensor)
        if count:
            if not self._allow_nan:
                self._refuse(name, stored, count)
            self.not_finite[name] = count
        return tensor

    def _as_it_lies(self, stored: StoredTensor) -> Tensor | None:
        """Returns a view of the source if it has exactly the tensor's bytes in order."""
        if stored.padding or len(stored.pieces) != 1:
            return None
        (piece,) = stored.pieces
        if piece.dst != full_region(stored.shape) or self._source.dtype(piece.hf_name) != stored.dtype:
            return None
        part = self._source.view(piece.hf_name, piece.src)
        return part if part is not None and part.is_contiguous() else None

    def _reserve(self, size: int) -> None:
        """Allocates both buffers for the largest tensor; pages that are never written take no memory."""
        for slot, buffer in enumerate(self._buffers):
            if buffer.numel() < size:
                self._buffers[slot] = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._buffers[slot] = torch.empty(size, dtype=torch.uint8)

    def _buffer(self, stored: StoredTensor, slot: int) -> Tensor:
        return self._buffers[slot][: num_bytes(stored)].view(DTYPES[stored.dtype]).view(stored.shape)

    def _refuse(self, name: str, stored: StoredTensor, count: int) -> None:
        for piece in stored.pieces:
            if found := count_not_finite(self._source.read(piece.hf_name, piece.src)):
                raise UserError(
                    f"'{self._source.folder}': {found} values of '{piece.hf_name}' are infinite or NaN. Check the "
                    "checkpoint, or allow such values with --allow-nan."
                )
        names = ", ".join(sorted({piece.hf_name for piece in stored.pieces}))
        raise UserError(
            f"{count} values of '{name}' (from {names}) do not fit into {stored.dtype}. Choose a wider dtype, or allow "
            "infinities with --allow-nan."
        )


def count_not_finite(tensor: Tensor) -> int:
    """Returns the number of infinite and NaN values, in the time of one sum if there are none."""
    if tensor.element_size() == 1:  # e4m3fn has no infinity; NaN has all bits but the sign set
        return int(((tensor.contiguous().view(torch.uint8) & 0x7F) == 0x7F).sum())
    if math.isfinite(float(tensor.sum())):  # in its own dtype: with a wider one torch is 30 times as slow
        return 0
    flat = tensor.reshape(-1)
    whole_rows = flat.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
    rows = flat[:whole_rows].view(-1, _ROW_ELEMENTS)
    count = int((~flat[whole_rows:].isfinite()).sum())
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        count += int((~chunk[~chunk.sum(1).isfinite()].isfinite()).sum())
    return count


def _worth_a_thread(stored: StoredTensor) -> bool:
    return _AHEAD_MIN_BYTES <= num_bytes(stored) <= _AHEAD_MAX_BYTES
