"""Matrix products with few rows, over a weight that is packed once for each refit.

Owns the choice of compute dtype and the packed copies of weights. On CUDA nothing is copied but FP8. On an x86 CPU
oneDNN's inner product takes the weight in an order of its own choice, so that no product reorders it, at the price of
one more copy of each matrix. There is one form, whatever the processor, its threads and the rows: forms differ in the
last bits, and a run that goes on must have the numbers of one that never stopped. A CPU without bfloat16 instructions
multiplies bfloat16 many times slower than float32, so there the copy is float32, and so are activations and KV cache.

A weight that is stored in FP8 is multiplied with its scales once for each refit, into a copy on every device: products
are those of the weights that were quantised, with activations that are not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.scales import Scales

ROWS_HINT = 64
"""Rows that the inner product's order is chosen for; any value from 8 up gives the same order."""

FEWEST_ROWS = 2
"""A product of one row is another kernel, which adds long sums in another order: a row's bits would depend on whether
it is alone."""


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
        scales: Of a weight that is stored in FP8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, scales: Scales | None = None) -> None:
        self._stored = (weight, bias)
        self._scales = scales
        self._dtype = dtype
        self._packs = _packs(weight.device)
        self._weight, self._bias = weight, bias

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` takes beside the stored weight."""
        weight, _ = self._stored
        copies = self._packs or weight.dtype != self._dtype
        return weight.numel() * self._dtype.itemsize if copies else 0

    def refresh(self) -> None:
        """Takes in the stored values."""
        weight, bias = self._stored
        self._bias = None if bias is None else bias.to(self._dtype)
        if self._scales is None:
            self._weight = weight.to(self._dtype)
        else:  # a copy that CUDA graphs have captured keeps its address
            kept = None if self._packs or self._weight is weight else self._weight
            self._weight = self._scales.weight(weight, kept, self._dtype)
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, ROWS_HINT)

    def forget(self) -> None:
        """Lets go of the copies that `refresh` made."""
        self._weight, self._bias = self._stored

    def __call__(self, x_PI: Tensor) -> Tensor:
        """The product [P, out]."""
        if not self._packs:
            return F.linear(x_PI, self._weight, self._bias)
        num = x_PI.size(0)
        if num < FEWEST_ROWS:
            x_PI = F.pad(x_PI, (0, 0, 0, FEWEST_ROWS - num))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_PI, self._weight, self._bias, "none", [], "")
        return out[:num]


def _packs(device: torch.device) -> bool:
    """Whether products are oneDNN's, over packed copies."""
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device.type == "cpu" and on_x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
