"""The actor's matrices in FP8: their scales, which all ranks know, and any part of them quantised as it is sent.

Owns `Quantizer`. Each rank finds the largest magnitudes of the blocks that it holds parts of, one reduction over the
job makes them those of whole blocks, and from then on every rank quantises what it sends, and fills the scales of its
engine, by itself. So FP8 travels, and what arrives is what quantising the whole Hugging Face tensors would give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import together
from mrl.resharding import fp8_quantize
from mrl.resharding.copy_op import Copy
from mrl.resharding.fp8 import Grids, block_indices
from mrl.resharding.layout import Layout, Region
from mrl.resharding.regions import intersect, slices, translate


class Quantizer:
    """One rank's part; `measure` comes before each refit."""

    def __init__(self, layout: Layout, sources: Mapping[str, Tensor], grids: Grids, device: torch.device) -> None:
        """Lays out the table of all scales.

        Args:
            layout: What this rank of the actor holds.
            sources: Its tensors; read whenever they are measured or quantised.
            grids: Of the matrices that are quantised.
            device: Of the table.
        """
        self._sources, self._grids, self._device = sources, grids, device
        self._pieces = {
            name: tuple(piece for piece in stored.pieces if piece.hf_name in grids) for name, stored in layout.items()
        }
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, grid in grids.items():
            rows, columns = grid.counts
            self._places[name] = (end, end := end + rows * columns)
        self._size = end
        self._multipliers = torch.empty(0)

    def measure(self) -> None:
        """Collective over the job: scales of the actor's weights of now.

        Raises:
            RuntimeError: On every rank, where a matrix has a value that is not finite; it is named.
        """
        with together():
            magnitudes = self._own_magnitudes()
        dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX)
        if not bool(magnitudes.isfinite().all()):
            named = next(name for name in self._grids if not bool(self._table(magnitudes, name).isfinite().all()))
            raise RuntimeError(f"'{named}' holds values that are not finite; it cannot be quantised to FP8")
        self._multipliers = fp8_quantize.multipliers(magnitudes)

    def scales(self, name: str, region: Region) -> Tensor:
        """What the stored values of a matrix are multiplied with: a region of its table, fp32."""
        return self._table(self._multipliers, name)[slices(region)].reciprocal()

    def quantize(self, copy: Copy, values: Tensor) -> Tensor:
        """The values of a copy's source, quantised."""
        name, region = self._origin(copy)
        return fp8_quantize.quantize(values, self._factors(name, region), *self._blocks(name, region, values))

    def meant(self, name: str, region: Region, values: Tensor) -> Tensor:
        """The weights that these become, which are a region of a matrix: quantised and multiplied with their scales."""
        factors, blocks = self._factors(name, region), self._blocks(name, region, values)
        stored = fp8_quantize.quantize(values, factors, *blocks)
        return fp8_quantize.dequantize(stored, factors.reciprocal(), *blocks, torch.empty_like(values))

    def _factors(self, name: str, region: Region) -> Tensor:
        return self._table(self._multipliers, name)[slices(self._grids[name].touched(region))]

    def _blocks(self, name: str, region: Region, values: Tensor) -> tuple[Tensor, Tensor]:
        return block_indices(self._grids[name], region, values.device)

    def _own_magnitudes(self) -> Tensor:
        """Of the parts of blocks that this rank holds; zero where it holds none, infinite where one is not finite."""
        found = torch.zeros(self._size, device=self._device)
        for source, pieces in self._pieces.items():
            for piece in pieces:
                grid, values = self._grids[piece.hf_name], self._sources[source].detach()[slices(piece.dst)]
                part = self._table(found, piece.hf_name)[slices(grid.touched(piece.src))]
                (row, _), (column, _) = piece.src
                torch.maximum(part, fp8_quantize.block_magnitudes(values, (row, column), grid.block), out=part)
        return found.nan_to_num_(nan=torch.inf, posinf=torch.inf)

    def _table(self, flat: Tensor, name: str) -> Tensor:
        return flat[slice(*self._places[name])].view(self._grids[name].counts)

    def _origin(self, copy: Copy) -> tuple[str, Region]:
        """The Hugging Face tensor of a copy's source, and the region of it."""
        for piece in self._pieces[copy.source_name]:
            if intersect(copy.source_region, piece.dst) == copy.source_region:
                return piece.hf_name, translate(copy.source_region, piece.dst, piece.src)
        raise RuntimeError(f"'{copy.source_name}'{list(copy.source_region)} is no part of a matrix that is quantised")
