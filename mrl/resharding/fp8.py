"""Which matrices an engine stores in FP8, the grid of blocks of each, and where an engine's tensors find their scales.

Owns the grids, in Hugging Face coordinates: a block is a part of a Hugging Face tensor, so neither values nor scales
depend on who holds what. From a layout in the model's dtype follow the layout in FP8 (`in_fp8`) and that of its scales
(`scale_tables`): for each piece of a stored matrix the table of the blocks that it touches, one piece after the other.
The arithmetic is in `resharding/fp8_quantize.py`.

Quantised are the linear layers inside the decoder's layers: attention, MLP, experts. Embeddings, head, norms, biases,
routers and the shared expert's gate stay as they are, as in TensorRT-LLM and in verl, which quantises that gate too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.models.base import ArchSpec, Kind
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor
from mrl.resharding.shards import hf_tensors, table

DTYPE = "float8_e4m3fn"
SCALES = "_scale_inv"
"""Behind the name of a matrix: the name of its scales, as transformers, vLLM and TensorRT-LLM spell it."""

BLOCK = (128, 128)
"""Rows and columns of `rollout.quantization=fp8`: DeepSeek's, verl's, TensorRT-LLM's FP8_BLOCK_SCALES."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of one Hugging Face matrix; the last of a row or column may be smaller.

    Attributes:
        shape: Of the matrix.
        block: Rows and columns of a block.
    """

    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of the table of scales."""
        (rows, columns), (height, width) = self.shape, self.block
        return -(-rows // height), -(-columns // width)

    def touched(self, region: Region) -> Region:
        """The part of the table that belongs to a region of the matrix."""
        return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(region, self.block, strict=True))


Grids = Mapping[str, BlockGrid]
"""Hugging Face name -> grid, of every matrix that is quantised."""


def grids_of(arch: ArchSpec, quantization: str | None) -> dict[str, BlockGrid]:
    """The grids of `rollout.quantization`: none without it."""
    found: dict[str, BlockGrid] = {}
    if quantization is None:
        return found
    experts = range(arch.moe.num_experts) if arch.moe else range(0)
    for spec in table(arch):
        if spec.kind in (Kind.REPLICATED, Kind.VOCAB):
            continue
        for name, shape in hf_tensors(spec, arch).items():
            if len(shape) != 2:
                continue
            rows, columns = shape
            grid = BlockGrid((rows, columns), BLOCK if quantization == "fp8" else (rows, columns))
            for layer in range(arch.num_layers):
                for expert in experts if spec.kind.is_expert else (None,):
                    found[name.format(layer=layer, expert=expert)] = grid
    return found


def is_quantized(stored: StoredTensor, grids: Grids) -> bool:
    """Whether what a tensor holds is quantised."""
    return bool(stored.pieces) and all(piece.hf_name in grids for piece in stored.pieces)


def in_fp8(layout: Layout, grids: Grids) -> Layout:
    """A layout with its quantised matrices in FP8, without their scales."""
    return {
        name: replace(stored, dtype=DTYPE) if is_quantized(stored, grids) else stored for name, stored in layout.items()
    }


def scale_tables(layout: Layout, grids: Grids) -> Layout:
    """The scales of a layout's quantised matrices, each under the matrix' name and `SCALES`."""
    return {
        f"{name}{SCALES}": _scale_table(stored, grids) for name, stored in layout.items() if is_quantized(stored, grids)
    }


def is_scale_table(stored: StoredTensor) -> bool:
    """Whether a stored tensor holds scales."""
    return bool(stored.pieces) and stored.pieces[0].hf_name.endswith(SCALES)


def matrix_of(piece: Piece) -> str:
    """The Hugging Face name of the matrix whose scales a piece holds."""
    return piece.hf_name.removesuffix(SCALES)


def _scale_table(stored: StoredTensor, grids: Grids) -> StoredTensor:
    pieces, first, width = [], 0, 0
    for piece in stored.pieces:
        rows, columns = grids[piece.hf_name].touched(piece.src)
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        pieces.append(Piece(f"{piece.hf_name}{SCALES}", (rows, columns), ((first, first + height), (0, width))))
        first += height
    return StoredTensor((first, width), "float32", tuple(pieces))


def scale_indices(stored: StoredTensor, grids: Grids) -> tuple[Tensor, Tensor]:
    """The row of `scale_tables`' table for each row of a stored matrix, and the column for each of its columns, int32.

    The pieces of a stored matrix lie one below the other and have the same columns of their Hugging Face tensors.
    """
    rows = torch.empty(stored.shape[0], dtype=torch.int32)
    columns = torch.empty(0, dtype=torch.int32)
    first = 0
    for piece in stored.pieces:
        own_rows, columns = block_indices(grids[piece.hf_name], piece.src)
        rows[slice(*piece.dst[0])] = own_rows + first
        first += int(own_rows[-1]) + 1
    return rows, columns


def block_indices(grid: BlockGrid, region: Region, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The blocks of each row and of each column of a region, counted from the first that it touches, int32."""
    rows, columns = (
        torch.arange(start, stop, dtype=torch.int32, device=device) // size - start // size
        for (start, stop), size in zip(region, grid.block, strict=True)
    )
    return rows, columns
