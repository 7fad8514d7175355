"""Block grids of the matrices that an engine stores in FP8, and the layouts of the matrices and their scales.

Grids are defined on Hugging Face tensors, so values and scales do not depend on the sharding. From a layout in the
model's dtype follow the layout in FP8 (`fp8_layout`) and that of its scales (`scale_tables`): for each piece of a
stored matrix the table of the blocks that it intersects, in the order of the pieces. `fp8_quantize.py` has the
arithmetic.

The linear layers of the decoder's layers are quantized: attention, MLP, experts. Embeddings, head, norms, biases,
routers and the shared expert's gate are not, as in TensorRT-LLM; verl quantizes that gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.models.base import ArchSpec, ShardKind
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor
from mrl.resharding.shards import hf_tensors, layers_of, param_specs

DTYPE = "float8_e4m3fn"
SCALES = "_scale_inv"
"""Suffix of the name of a matrix' scales, as in transformers, vLLM and TensorRT-LLM."""

BLOCK = (128, 128)
"""Rows and columns of a block of `rollout.quantization=fp8`: DeepSeek's, verl's, TensorRT-LLM's FP8_BLOCK_SCALES."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of one Hugging Face matrix; the last one of a row or column may be smaller.

    Attributes:
        shape: Rows and columns of the matrix.
        block: Rows and columns of a block.
    """

    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of the table of scales."""
        (rows, columns), (height, width) = self.shape, self.block
        return -(-rows // height), -(-columns // width)

    def intersecting_blocks(self, region: Region) -> Region:
        """Returns the region of the table of scales whose blocks intersect a region of the matrix."""
        return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(region, self.block, strict=True))


Grids = Mapping[str, BlockGrid]
"""Hugging Face name -> grid, for every quantized matrix."""


def block_grids(arch: ArchSpec, quantization: str | None) -> dict[str, BlockGrid]:
    """Returns the grids for `rollout.quantization`; {} for None."""
    found: dict[str, BlockGrid] = {}
    if quantization is None:
        return found
    experts = range(arch.moe.num_experts) if arch.moe else range(0)
    for spec in param_specs(arch):
        if spec.kind in (ShardKind.REPLICATED, ShardKind.VOCAB):
            continue
        for name, shape in hf_tensors(spec, arch).items():
            if len(shape) != 2:
                continue
            rows, columns = shape
            grid = BlockGrid((rows, columns), BLOCK if quantization == "fp8" else (rows, columns))
            for layer in layers_of(spec, arch):
                for expert in experts if spec.kind.is_expert else (None,):
                    found[name.format(layer=layer, expert=expert)] = grid
    return found


def is_quantized(stored: StoredTensor, grids: Grids) -> bool:
    """Returns whether a stored tensor consists of quantized matrices."""
    return bool(stored.pieces) and all(piece.hf_name in grids for piece in stored.pieces)


def fp8_layout(layout: Layout, grids: Grids) -> Layout:
    """Returns a layout with its quantized matrices in FP8, without their scales."""
    return {
        name: replace(stored, dtype=DTYPE) if is_quantized(stored, grids) else stored for name, stored in layout.items()
    }


def scale_tables(layout: Layout, grids: Grids) -> Layout:
    """Returns the layout of the scales of a layout's quantized matrices; names are the matrix' plus `SCALES`."""
    return {
        f"{name}{SCALES}": _scale_table(stored, grids) for name, stored in layout.items() if is_quantized(stored, grids)
    }


def is_scale_table(stored: StoredTensor) -> bool:
    """Returns whether a stored tensor consists of scales."""
    return bool(stored.pieces) and stored.pieces[0].hf_name.endswith(SCALES)


def matrix_of(piece: Piece) -> str:
    """Returns the Hugging Face name of the matrix to which a piece of scales belongs."""
    return piece.hf_name.removesuffix(SCALES)


def _scale_table(stored: StoredTensor, grids: Grids) -> StoredTensor:
    pieces, first, width = [], 0, 0
    for piece in stored.pieces:
        rows, columns = grids[piece.hf_name].intersecting_blocks(piece.src)
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        pieces.append(Piece(f"{piece.hf_name}{SCALES}", (rows, columns), ((first, first + height), (0, width))))
        first += height
    return StoredTensor((first, width), "float32", tuple(pieces))


def scale_indices(stored: StoredTensor, grids: Grids) -> tuple[Tensor, Tensor]:
    """Returns the row and the column of the table of scales for each row and each column of a stored matrix, int32.

    The pieces of a stored matrix are stacked by rows and have the same columns of their Hugging Face tensors.
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
    """Returns the block of each row and of each column of a region, counted from the first one it intersects, int32."""
    rows, columns = (
        torch.arange(start, stop, dtype=torch.int32, device=device) // size - start // size
        for (start, stop), size in zip(region, grid.block, strict=True)
    )
    return rows, columns
