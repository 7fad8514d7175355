"""Matrix products with few rows: the same weight, in the form in which this processor multiplies it fastest.

Owns the choice of compute dtype and the packed copies of weights. On CUDA nothing is copied. On an x86 CPU oneDNN's
blocked order saves it from reordering the weight in every product, at the price of one more copy of each matrix. Its
1 x 1 convolution over images whose pixels are the rows is faster than its inner product, but keeps to one order only
for wide weights on few threads; the inner product does the rest. A CPU without bfloat16 instructions multiplies
bfloat16 many times slower than float32, so there the copy is float32, and so are activations and KV cache.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_HINT = 64
"""Rows that the inner product's order is chosen for; any value from 8 up gives the same order."""

IMAGE_ROWS = (32, 20, 16)
FEW_ROWS = (8, 4)
"""Sizes of images, and those for up to 8 rows. Of other sizes some want another order, and a reorder in each call."""

IMAGE_THREADS = 2
IMAGE_COLUMNS = 256
"""On up to this many threads, with at least this many outputs for each, these sizes want the same order on AVX2, by
trial; [640, 4864] on two threads does not. There a product reorders the weight, which is slower and not wrong."""


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
        few_rows: Most products have less than 16 rows (an expert's tokens): the inner product, which pads none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, few_rows: bool = False) -> None:
        self._stored = (weight, bias)
        self._dtype = dtype
        self._out, self._in = weight.shape
        self._form = _form(weight)
        if few_rows and self._form == "images":
            self._form = "product"
        self._weight, self._bias = weight, bias

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` takes beside the stored weight."""
        weight, _ = self._stored
        copies = self._form != "stored" or weight.dtype != self._dtype
        return weight.numel() * self._dtype.itemsize if copies else 0

    def refresh(self) -> None:
        """Takes in the stored values."""
        weight, bias = self._stored
        self._bias = None if bias is None else bias.to(self._dtype)
        self._weight = weight.to(self._dtype)
        if self._form == "product":
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, ROWS_HINT)
        elif self._form == "images":
            self._weight = torch.ops.mkldnn._reorder_convolution_weight(
                self._weight[:, :, None, None], [0, 0], [1, 1], [1, 1], 1, [1, self._in, IMAGE_ROWS[0], 1]
            )

    def __call__(self, x_PI: Tensor) -> Tensor:
        """The product [P, out]."""
        if self._form == "images":
            return self._convolve(x_PI)
        if self._form == "product":
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x_PI, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x_PI, self._weight, self._bias)

    def _convolve(self, x_PI: Tensor) -> Tensor:
        num, size, out = x_PI.size(0), self._in, self._out
        rows = min(FEW_ROWS if num <= FEW_ROWS[0] else IMAGE_ROWS, key=lambda rows: -num % rows)
        padding = -num % rows
        x_PI = F.pad(x_PI, (0, 0, 0, padding)) if padding else x_PI.contiguous()
        pixels = x_PI.as_strided(((num + padding) // rows, size, rows, 1), (rows * size, 1, size, size))
        product: Tensor = torch.ops.mkldnn._convolution_pointwise(
            pixels, self._weight, self._bias, [0, 0], [1, 1], [1, 1], 1, "none", [], ""
        )
        return product.as_strided((num, out), (out, 1))


def _form(weight: Tensor) -> Literal["stored", "product", "images"]:
    """How a weight is kept and multiplied."""
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if weight.device.type != "cpu" or not on_x86 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "stored"
    threads = torch.get_num_threads()
    return "images" if threads <= IMAGE_THREADS and weight.size(0) >= IMAGE_COLUMNS * threads else "product"
