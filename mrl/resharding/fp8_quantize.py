"""float8_e4m3fn with fp32 scales: weights to it and back.

Owns the arithmetic, in the two forms that are written down elsewhere. A stored value times its scale is the weight; the
error is at most 1/16 of the value, or 2^-10 of the scale where the value is smaller than 2^-6 of it.

- Blocks of a matrix, as transformers' fine-grained FP8 has them, bit for bit, and verl's FP8 rollouts, up to the last
  bit of a scale: multiplier = 1 / largest magnitude x 448, stored value = weight x multiplier, scale = 1 / multiplier.
- Whole matrices, as TensorRT-LLM's checkpoints have them: scale = largest magnitude / 448, stored value = weight /
  scale.

Blocks lie on a grid over the whole matrix. A part of it finds its scales by index: `rows` and `columns` say for each of
its own rows and columns which row and column of the table of scales is theirs, so that a part may begin anywhere.

Shapes: M x N a matrix or a part of one, R x C a table of scales, G matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.errors import UserError

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
"""448."""

LARGEST_MULTIPLIER = 2.0**126
"""Of a block: its inverse is the smallest normal fp32 number. Only blocks below 1e-35 would have a larger one."""

BAND_ELEMENTS = 1 << 24
"""Elements that exist in fp32 at a time."""


def block_magnitudes(values_MN: Tensor, origin: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block that a part of a matrix touches, fp32 [R, C]; NaN where there is one.

    Args:
        values_MN: The part.
        origin: Where it begins in the matrix.
        block: Rows and columns of a block; the grid begins at the matrix's first element.
    """
    by_column = _fold(values_MN.detach().abs(), 1, origin[1], block[1])
    return _fold(by_column, 0, origin[0], block[0]).float()


def _fold(values: Tensor, dim: int, start: int, block: int) -> Tensor:
    """The largest of each run of `block` along `dim`; the first element is number `start` of its axis."""
    size, before = values.size(dim), start % block
    count = -(-(before + size) // block)
    if count == 1:
        return values.amax(dim, keepdim=True)
    ends = (before, count * block - before - size)
    if any(ends):
        values = F.pad(values, ends if dim == 1 else (0, 0, *ends))
    shape = values.shape
    return values.reshape(*shape[:dim], count, block, *shape[dim + 1 :]).amax(dim + 1)


def multipliers(magnitudes: Tensor) -> Tensor:
    """Largest magnitudes -> what the values of their blocks are multiplied with, fp32; 1 where all are zero."""
    found = torch.where(magnitudes > 0, magnitudes.reciprocal() * LARGEST, 1.0)
    return found.clamp_max(LARGEST_MULTIPLIER)


def quantize(values_MN: Tensor, multipliers_RC: Tensor, rows_M: Tensor, columns_N: Tensor) -> Tensor:
    """A part of a matrix -> float8_e4m3fn [M, N].

    Args:
        values_MN: Any float type; finite, and none above its block's largest magnitude.
        multipliers_RC: Of the blocks.
        rows_M: Row of the table for each row, int.
        columns_N: Column of the table for each column, int.
    """
    quantized = torch.empty(values_MN.shape, dtype=DTYPE, device=values_MN.device)
    for band, factors in _bands(multipliers_RC, rows_M, columns_N):
        quantized[band] = (values_MN[band].float() * factors).clamp_(-LARGEST, LARGEST).to(DTYPE)
    return quantized


def dequantize(stored_MN: Tensor, scales_RC: Tensor, rows_M: Tensor, columns_N: Tensor, out_MN: Tensor) -> Tensor:
    """The weights that a part of a matrix stands for, multiplied in fp32 and cast to the dtype of `out_MN`.

    Args:
        stored_MN: float8_e4m3fn.
        scales_RC: Of the blocks.
        rows_M: As in `quantize`.
        columns_N: As in `quantize`.
        out_MN: Is filled and returned.
    """
    for band, factors in _bands(scales_RC, rows_M, columns_N):
        out_MN[band] = stored_MN[band].float() * factors
    return out_MN


def _bands(table_RC: Tensor, rows_M: Tensor, columns_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a part, a few at a time, and the table's entry for each of their elements."""
    step = max(1, BAND_ELEMENTS // len(columns_N))
    for first in range(0, len(rows_M), step):
        band = slice(first, first + step)
        yield band, table_RC.index_select(0, rows_M[band]).index_select(1, columns_N)


def quantize_matrices(name: str, matrices_GMN: Tensor) -> tuple[Tensor, Tensor]:
    """Float matrices -> (float8_e4m3fn of the same shape, fp32 scales [G]), as TensorRT-LLM's checkpoints have them.

    Args:
        name: For the error message.
        matrices_GMN: Each with a scale of its own.

    Raises:
        UserError: A value is not finite.
    """
    quantized = torch.empty(matrices_GMN.shape, dtype=DTYPE)
    scales = torch.ones(len(matrices_GMN))
    for index, matrix in enumerate(matrices_GMN):
        low, high = torch.aminmax(matrix.float())
        largest = torch.maximum(-low, high)
        if not torch.isfinite(largest):
            raise UserError(f"'{name}' holds values that are not finite; it cannot be quantised to FP8.")
        if largest > 0:
            scales[index] = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        quantized[index] = (matrix.float() / scales[index]).clamp_(-LARGEST, LARGEST).to(DTYPE)
    return quantized, scales


def dequantize_matrix(matrix_MN: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn and its one scale -> fp32."""
    return matrix_MN.float() * scale.float()
