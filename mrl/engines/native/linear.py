"""Matrix products with few rows: the same weight, in the form in which this processor multiplies it fastest.

Owns the choice of compute dtype and the packed copies of weights. On CUDA nothing is copied. On an x86 CPU oneDNN's
blocked order saves it from reordering the weight in every product, at the price of one more copy of each matrix. A CPU
without bfloat16 instructions multiplies bfloat16 many times slower than float32, so there the copy is float32, and so
are activations and KV cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_HINT = 64
"""Rows that oneDNN chooses the blocked order for; any value from 8 up gives the same order."""


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations for stored weights of `dtype`."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return dtype


class Linear:
    """x -> x weight^T + bias.

    Args:
        weight: Stored weight [out, in]; updates in place are seen after `refresh`.
        bias: Stored bias [out].
        dtype: Of the product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._stored = (weight, bias)
        self._dtype = dtype
        on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
        self._packs = weight.device.type == "cpu" and on_x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight, self._bias = weight, bias

    def refresh(self) -> None:
        """Takes in the stored values."""
        weight, bias = self._stored
        self._bias = None if bias is None else bias.to(self._dtype)
        self._weight = weight.to(self._dtype)
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, ROWS_HINT)

    def __call__(self, x_PI: Tensor) -> Tensor:
        """The product [P, out]."""
        if self._packs:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x_PI, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x_PI, self._weight, self._bias)
