"""Quantization to float8_e4m3fn with fp32 scales, and back.

A stored value times its scale is the weight. The error is at most 1/16 of the value, or 2^-10 of the scale for values
below 2^-6 of it. Two schemes:

- Blocks of a matrix: bit for bit as in transformers' fine-grained FP8, and as in verl's FP8 rollouts up to the last bit
  of a scale. multiplier = 1 / largest magnitude x 448, stored value = weight x multiplier, scale = 1 / multiplier.
- Complete matrices, as in TensorRT-LLM's checkpoints: scale = largest magnitude / 448, stored value = weight / scale.

Blocks lie on a grid over the full matrix. A part of the matrix finds its scales by index: `rows` and `columns` give the
row and column of the table of scales for each of its rows and columns, so that a part may begin anywhere.

Shapes: M x N a matrix or a part of one, R x C a table of scales, G matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.errors import UserError

DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(DTYPE).max
"""Largest finite value of the dtype, 448."""

MAX_MULTIPLIER = 2.0**126
"""Upper bound of multipliers: its inverse is the smallest normal fp32 number. Only blocks below 1e-35 reach it."""

BAND_ELEMENTS = 1 << 24
"""Elements that are converted to fp32 at a time."""


def block_magnitudes(values_MN: Tensor, origin: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Returns the largest magnitude in each block that a part of a matrix intersects, fp32 [R, C]; NaN if it has a NaN.

    Args:
        values_MN: Part of the matrix.
        origin: Row and column of its first element in the matrix.
        block: Rows and columns of a block; the grid begins at the matrix's first element.
    """
    by_column = _max_per_block(values_MN.detach().abs(), 1, origin[1], block[1])
    return _max_per_block(by_column, 0, origin[0], block[0]).float()


def _max_per_block(values: Tensor, dim: int, start: int, block: int) -> Tensor:
    """Returns the maximum of each run of `block` elements along `dim`; `start` is the index of the first element."""
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
    """Converts the amax of blocks to their multipliers FP8_MAX / amax, fp32; 1 for blocks of zeros."""
    found = torch.where(magnitudes > 0, magnitudes.reciprocal() * FP8_MAX, 1.0)
    return found.clamp_max(MAX_MULTIPLIER)


def quantize(values_MN: Tensor, multipliers_RC: Tensor, rows_M: Tensor, columns_N: Tensor) -> Tensor:
    """Quantizes a part of a matrix to float8_e4m3fn [M, N], with one scale per block.

    Args:
        values_MN: Part of the matrix, any float dtype, finite.
        multipliers_RC: FP8_MAX / amax of each block, the inverse of its scale, fp32; amax is over the entire block,
            which may extend beyond the part.
        rows_M: Row index into `multipliers_RC` for each row of the part, int.
        columns_N: Column index into `multipliers_RC` for each column of the part, int.
    """
    quantized = torch.empty(values_MN.shape, dtype=DTYPE, device=values_MN.device)
    for band, factors in _row_bands(multipliers_RC, rows_M, columns_N):
        quantized[band] = (values_MN[band].float() * factors).clamp_(-FP8_MAX, FP8_MAX).to(DTYPE)
    return quantized


def dequantize(stored_MN: Tensor, scales_RC: Tensor, rows_M: Tensor, columns_N: Tensor, out_MN: Tensor) -> Tensor:
    """Multiplies stored values with their scales in fp32 and casts to the dtype of `out_MN`.

    Args:
        stored_MN: Part of a matrix, float8_e4m3fn.
        scales_RC: Scale of each block, fp32.
        rows_M: Row index into `scales_RC` for each row of the part, int.
        columns_N: Column index into `scales_RC` for each column of the part, int.
        out_MN: Output; filled and returned.
    """
    for band, factors in _row_bands(scales_RC, rows_M, columns_N):
        out_MN[band] = stored_MN[band].float() * factors
    return out_MN


def _row_bands(table_RC: Tensor, rows_M: Tensor, columns_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a few rows of a part at a time, with the entry of `table_RC` for each of their elements."""
    step = max(1, BAND_ELEMENTS // len(columns_N))
    for first in range(0, len(rows_M), step):
        band = slice(first, first + step)
        yield band, table_RC.index_select(0, rows_M[band]).index_select(1, columns_N)


def quantize_matrices(name: str, matrices_GMN: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes matrices with one scale each, as in TensorRT-LLM's checkpoints.

    Args:
        name: Tensor name for the error message.
        matrices_GMN: Matrices, any float dtype.

    Returns:
        (float8_e4m3fn [G, M, N], scales [G] in fp32).

    Raises:
        UserError: A value is not finite.
    """
    quantized = torch.empty(matrices_GMN.shape, dtype=DTYPE)
    scales = torch.ones(len(matrices_GMN))
    for index, matrix in enumerate(matrices_GMN):
        low, high = torch.aminmax(matrix.float())
        largest = torch.maximum(-low, high)
        if not torch.isfinite(largest):
            raise UserError(f"'{name}' has values that are not finite; it cannot be quantized to FP8.")
        if largest > 0:
            scales[index] = (largest / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        quantized[index] = (matrix.float() / scales[index]).clamp_(-FP8_MAX, FP8_MAX).to(DTYPE)
    return quantized, scales


def dequantize_matrix(matrix_MN: Tensor, scale: Tensor) -> Tensor:
    """Multiplies a float8_e4m3fn matrix with its one scale; fp32."""
    return matrix_MN.float() * scale.float()
