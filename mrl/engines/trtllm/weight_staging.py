"""Staging of a weight sync: assembles Hugging Face tensors for TensorRT-LLM's loader from received regions.

A tensor's full-size buffer is allocated at its first region. The tensor is complete when every element that this rank
reads has arrived once. Elements that this rank does not read are NaN, so that a module that reads them anyway is
detected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.resharding.checksum import bit_sum
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout
from mrl.resharding.regions import full_region, slices, volume
from mrl.resharding.trtllm_reads import cut_dim, to_full_region
from mrl.resharding.weight_slice import WeightSlice

NAN_BYTE = 0xFF
"""Byte that fills an element with NaN in every weight dtype."""


class Assembler:
    """Staging buffers of one weight sync.

    Attributes:
        ready: Complete tensors not yet taken, in the order of completion.
        ready_bytes: Size of `ready`, bytes.
        peak_bytes: Peak size of all buffers, bytes.
    """

    def __init__(self, layout: Layout, full: Layout, device: torch.device) -> None:
        """Creates an empty staging area.

        Args:
            layout: Parts of tensors that this rank reads.
            full: Full shapes of the same tensors.
            device: Device of the buffers.
        """
        self._layout, self._full = layout, full
        self._device = device
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._begun: set[str] = set()
        self._num_complete, self._bytes = 0, 0
        self.ready: dict[str, Tensor] = {}
        self.ready_bytes, self.peak_bytes = 0, 0

    def add(self, items: Sequence[WeightSlice]) -> None:
        """Copies regions into their buffers.

        Raises:
            RuntimeError: A region does not fit, or a tensor received more elements than it has; the message names it.
        """
        for item in items:
            stored = self._layout.get(item.name)
            if stored is None:
                raise RuntimeError(f"'{item.name}' is not a tensor of this model")
            dtype = DTYPES[stored.dtype]
            if item.name not in self._open:
                if item.name in self._begun:
                    raise RuntimeError(f"'{item.name}' was complete, and more of it came: {item.region}")
                self._begun.add(item.name)
                buffer = self._allocate(item.name)
                self._open[item.name] = (buffer, volume(full_region(stored.shape)))
                self._bytes += buffer.nbytes
                self.peak_bytes = max(self.peak_bytes, self._bytes)
            buffer, missing = self._open[item.name]
            extents = [min(stop, size) - start for (start, stop), size in zip(item.region, stored.shape, strict=True)]
            if extents != list(item.data.shape) or item.data.dtype != dtype or volume(item.region) > missing:
                raise RuntimeError(
                    f"'{item.name}' {item.region}: got {list(item.data.shape)} {item.data.dtype}, expected "
                    f"{extents} {dtype} and at most {missing} more elements"
                )
            for part, place in to_full_region(stored, item.region):
                buffer[slices(place)].copy_(item.data[slices(part)])
            missing -= volume(item.region)
            self._open[item.name] = (buffer, missing)
            if not missing:
                self.ready[item.name] = self._open.pop(item.name)[0]
                self.ready_bytes += buffer.nbytes
                self._num_complete += 1

    @property
    def is_complete(self) -> bool:
        """True if every tensor is complete."""
        return self._num_complete == len(self._layout)

    @property
    def lacking(self) -> list[str]:
        """Names of tensors with missing elements."""
        return [name for name in self._layout if name not in self._begun or name in self._open]

    def checksum(self, name: str, tensor: Tensor) -> int:
        """Returns the checksum of the part of a tensor that this rank reads (`resharding/checksum.py`)."""
        return sum(bit_sum(tensor[slices(piece.src)]) for piece in self._layout[name].pieces)

    def _allocate(self, name: str) -> Tensor:
        part, full = self._layout[name], self._full[name]
        buffer = torch.empty(full.shape, dtype=DTYPES[full.dtype], device=self._device)
        if cut_dim(part, full) is not None:
            buffer.view(torch.uint8).fill_(NAN_BYTE)
        return buffer

    def take(self) -> dict[str, Tensor]:
        """Returns the complete tensors and gives up their ownership."""
        taken, self.ready = self.ready, {}
        self._bytes -= self.ready_bytes
        self.ready_bytes = 0
        return taken
