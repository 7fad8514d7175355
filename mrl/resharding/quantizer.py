"""FP8 quantization of the actor's matrices during a weight sync: scales known to all ranks, parts quantized when sent.

Each rank computes the largest magnitude of its parts of the blocks. A max-reduction over the job gives those of
complete blocks. Then each rank quantizes the parts that it sends and fills its engine's scales without communication.
So FP8 is sent, and the result equals quantization of the full Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import raise_on_all_ranks
from mrl.resharding import fp8_quantize
from mrl.resharding.copy_op import Copy
from mrl.resharding.fp8 import Grids, block_indices
from mrl.resharding.layout import Layout, Region
from mrl.resharding.merged_weights import read_region
from mrl.resharding.regions import intersect, slices, translate


class Quantizer:
    """One rank's quantizer; call `compute_scales` before each weight sync."""

    def __init__(self, layout: Layout, sources: Mapping[str, Tensor], grids: Grids, device: torch.device) -> None:
        """Allocates space for the scales of all matrices.

        Args:
            layout: Layout of this rank's part of the actor.
            sources: Its tensors; read by `compute_scales` and when parts are quantized.
            grids: Hugging Face name -> block grid, for each quantized matrix.
            device: Device of the scales.
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

    def compute_scales(self) -> None:
        """Collective over the job: computes the scales of the current actor weights.

        Raises:
            RuntimeError: A matrix has a value that is not finite; raised on every rank, naming the matrix.
        """
        with raise_on_all_ranks():
            magnitudes = self._own_magnitudes()
        dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX)
        if not bool(magnitudes.isfinite().all()):
            named = next(name for name in self._grids if not bool(self._table(magnitudes, name).isfinite().all()))
            raise RuntimeError(f"'{named}' has values that are not finite; it cannot be quantized to FP8")
        self._multipliers = fp8_quantize.multipliers(magnitudes)

    def scales(self, name: str, region: Region) -> Tensor:
        """Returns the scales (weight = stored value * scale) of a region of a matrix' table of blocks, fp32."""
        return self._table(self._multipliers, name)[slices(region)].reciprocal()

    def quantize(self, copy: Copy, values: Tensor) -> Tensor:
        """Returns the source values of a copy in FP8."""
        name, region = self._hf_region(copy)
        return fp8_quantize.quantize(values, self._block_multipliers(name, region), *self._blocks(name, region, values))

    def roundtrip(self, name: str, region: Region, values: Tensor) -> Tensor:
        """Quantizes and dequantizes a region of a matrix: returns the weights that the engine computes with."""
        factors, blocks = self._block_multipliers(name, region), self._blocks(name, region, values)
        stored = fp8_quantize.quantize(values, factors, *blocks)
        return fp8_quantize.dequantize(stored, factors.reciprocal(), *blocks, torch.empty_like(values))

    def _block_multipliers(self, name: str, region: Region) -> Tensor:
        return self._table(self._multipliers, name)[slices(self._grids[name].intersecting_blocks(region))]

    def _blocks(self, name: str, region: Region, values: Tensor) -> tuple[Tensor, Tensor]:
        return block_indices(self._grids[name], region, values.device)

    def _own_magnitudes(self) -> Tensor:
        """Returns the largest magnitude of this rank's part of each block.

        0 if it has no part of the block, infinity if one of its values is not finite.
        """
        found = torch.zeros(self._size, device=self._device)
        for source, pieces in self._pieces.items():
            for piece in pieces:
                grid, values = self._grids[piece.hf_name], read_region(self._sources, source, piece.dst)
                part = self._table(found, piece.hf_name)[slices(grid.intersecting_blocks(piece.src))]
                (row, _), (column, _) = piece.src
                torch.maximum(part, fp8_quantize.block_magnitudes(values, (row, column), grid.block), out=part)
        return found.nan_to_num_(nan=torch.inf, posinf=torch.inf)

    def _table(self, flat: Tensor, name: str) -> Tensor:
        return flat[slice(*self._places[name])].view(self._grids[name].counts)

    def _hf_region(self, copy: Copy) -> tuple[str, Region]:
        """Returns the Hugging Face name of a copy's source, and the region in that tensor."""
        for piece in self._pieces[copy.source_name]:
            if intersect(copy.source_region, piece.dst) == copy.source_region:
                return piece.hf_name, translate(copy.source_region, piece.dst, piece.src)
        raise RuntimeError(f"'{copy.source_name}'{list(copy.source_region)} is not part of a quantized matrix")
