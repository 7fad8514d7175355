"""Matrix products with few rows, with a weight that is packed once per weight sync.

On CUDA only FP8 weights are copied. On an x86 CPU each product uses the fastest kernel measured for its shape
(`gemm_autotune`), at the price of one more copy of most matrices. The kernel is the same for any number of rows, on
every rank and in every run on a machine, so that a resumed run has the numbers of an uninterrupted one. A CPU without
bfloat16 instructions multiplies bfloat16 much slower than float32, so there the copy, activations and KV cache are
float32. With `rollout.true_on_policy` every product uses the kernel that the actor shares.

A weight stored in FP8 is dequantized once per weight sync into a copy, on every device: products use the quantized
weights' values, with unquantized activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.gemm_autotune import ROW_BY_ROW, GemmKernel, kernel_for, row_by_row
from mrl.models.kernels.bindings import Packed
from mrl.resharding.lora import AdaptedMatrix


def compute_dtype(dtype: torch.dtype, device: torch.device, *, exact: bool = False) -> torch.dtype:
    """Returns the dtype of activations: float32 for bfloat16 weights on a CPU without AVX512-BF16, else `dtype`.

    Args:
        dtype: Dtype of the stored weights.
        device: Device of the weights.
        exact: Always return `dtype`, as the actor does (`rollout.true_on_policy`).
    """
    if not exact and device.type == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return dtype


class Linear:
    """Computes x weight^T + bias.

    Args:
        weight: Stored weight [out, in]; `refresh` follows an update.
        bias: Stored bias [out].
        dtype: Dtype of the product.
        scales: Scales of a weight stored in FP8.
        exact: Use the kernel that the actor shares.
        compiled: Allow the compiled kernel.
        adapters: Low-rank adapters of the weight, which `refresh` merges into a copy; a product with the stored weight
            adds theirs.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        scales: Scales | None = None,
        *,
        exact: bool = False,
        compiled: bool = False,
        adapters: LinearAdapters | None = None,
    ) -> None:
        self._stored = (weight, bias)
        self._scales, self._adapters = scales, adapters
        self._dtype = dtype
        self._form: GemmKernel | None = None
        if exact:
            self._form = row_by_row(weight.size(0), dtype)
        elif packs(weight.device):
            self._form = kernel_for(tuple(weight.shape), dtype, compiled=compiled)
        self._weight, self._bias = weight, bias
        self._packed: Tensor | None = None
        self._copy: Tensor | None = None

    @property
    def copy(self) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of the weight's copy in another dtype, which `copy_into` can place; None: no copy."""
        weight, _ = self._stored
        return (weight.shape, self._dtype) if self._form is None and weight.dtype != self._dtype else None

    def copy_into(self, memory: Tensor) -> None:
        """Makes `refresh` write the copy of the weight to `memory`, so that captured graphs stay valid."""
        self._copy = memory

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a product reads."""
        adapters = [] if self._adapters is None or self._merges else self._adapters.reads
        return [self._weight, *([] if self._bias is None else [self._bias]), *adapters]

    @property
    def _merges(self) -> bool:
        """True if products use a copy of the weight, into which the adapters are merged."""
        return self._form is not None or self._stored[0].dtype != self._dtype

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` allocates in addition to the stored weight."""
        weight, _ = self._stored
        copies = weight.dtype != self._dtype or (
            self._form is not None and (self._form.copies or self._adapters is not None)
        )
        return weight.numel() * self._dtype.itemsize if copies else 0

    @property
    def num_inputs(self) -> int:
        """Number of input features, the columns of the stored weight."""
        return self._stored[0].size(1)

    @property
    def row_by_row(self) -> Packed | None:
        """Weight and bias for `Library.product`; None if the product uses another kernel."""
        if self._form is None or self._form.name != ROW_BY_ROW:
            return None
        return self._weight, self._bias

    def refresh(self) -> None:
        """Updates the copies from the stored values."""
        weight, bias = self._stored
        self._bias = None if bias is None else bias.to(self._dtype)
        if self._scales is not None:
            self._weight = self._scales.weight(weight, self._copy, self._dtype)
        elif self._copy is not None:
            self._weight = self._copy.copy_(weight)
        else:
            self._weight = weight.to(self._dtype)
        if self._adapters is not None and self._merges:
            merged = self._adapters.merged(self._weight)
            self._weight = merged if self._copy is None else self._copy.copy_(merged)
        if self._form is not None:
            earlier = self._packed if self._form.in_place else None
            self._packed = None
            self._packed = self._weight = self._form.pack(self._weight, earlier)

    def free_copies(self) -> None:
        """Frees the copies that `refresh` made."""
        self._weight, self._bias = self._stored
        self._packed = None

    def __call__(self, x_PI: Tensor) -> Tensor:
        """Returns the product [P, out]."""
        if self._form is None:
            product = F.linear(x_PI, self._weight, self._bias)
            return product if self._adapters is None or self._merges else self._adapters.add_to(product, x_PI)
        return self._form(x_PI, self._weight, self._bias)


class LinearAdapters:
    """Low-rank adapters of a matrix: runs of its rows, each with its lora_A and its rows of lora_B.

    Args:
        runs: (lora_A [r, in], rows of lora_B [run, r], first row, row after the last); views of stored tensors.
        scale: Factor of the products.
    """

    def __init__(self, runs: Sequence[tuple[Tensor, Tensor, int, int]], scale: float) -> None:
        self._runs, self._scale = runs, scale

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a product reads."""
        return [tensor for run in self._runs for tensor in run[:2]]

    def merged(self, weight: Tensor) -> Tensor:
        """Returns a copy of the weight [out, in] with the adapters merged into it."""
        wide = weight.to(torch.float32, copy=True)
        for lora_a, lora_b, start, stop in self._runs:
            wide[start:stop].addmm_(lora_b.float(), lora_a.float(), alpha=self._scale)
        return wide.to(weight.dtype)

    def add_to(self, product: Tensor, x_PI: Tensor) -> Tensor:
        """Adds the adapters' products to the weight's [P, out], in place."""
        for lora_a, lora_b, start, stop in self._runs:
            product[:, start:stop].addmm_(
                F.linear(x_PI, lora_a.to(x_PI.dtype)), lora_b.T.to(x_PI.dtype), alpha=self._scale
            )
        return product


def adapters_of_rows(
    matrix: AdaptedMatrix, tensors: Mapping[str, Tensor], scale: float, first: int, last: int
) -> LinearAdapters | None:
    """Returns the adapters of rows `first` to `last` - 1 of a matrix; None if there are none.

    Args:
        matrix: Matrix with adapters.
        tensors: Stored adapters by name.
        scale: Factor of the products.
        first: First row.
        last: Row after the last.
    """
    lora_a, lora_b = tensors[matrix.a_name], tensors[matrix.b_name]
    rank = lora_b.size(1)
    runs = [
        (lora_a[index * rank : (index + 1) * rank], lora_b[start:stop], start - first, stop - first)
        for index, start, stop in matrix.segments()
        if first <= start < last
    ]
    return LinearAdapters(runs, scale) if runs else None


def packs(device: torch.device) -> bool:
    """Returns whether products on this device use measured kernels with packed weights."""
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device.type == "cpu" and on_x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
