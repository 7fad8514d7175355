"""float8_e4m3fn with one scale per matrix: weights to it and back.

Owns the arithmetic: scale = largest magnitude / 448, stored value = weight / scale, rounded to the nearest. The error
is at most 1/16 of the value, or 2^-10 of the scale where the value is smaller than 2^-6 of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.errors import UserError

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""


def quantize(name: str, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Float matrices -> (float8_e4m3fn of the same shape, fp32 scales [G]).

    Args:
        name: For the error message.
        matrices: [G, rows, columns], each with a scale of its own.

    Raises:
        UserError: A value is not finite.
    """
    quantized = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn)
    scales = torch.ones(len(matrices))
    for index, matrix in enumerate(matrices):
        low, high = torch.aminmax(matrix.float())
        largest = torch.maximum(-low, high)
        if not torch.isfinite(largest):
            raise UserError(f"'{name}' holds values that are not finite; it cannot be quantised to FP8.")
        if largest > 0:
            scales[index] = (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        quantized[index] = (matrix.float() / scales[index]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return quantized, scales


def dequantize(matrix: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn and its scale (one element) -> fp32."""
    return matrix.float() * scale.float()
