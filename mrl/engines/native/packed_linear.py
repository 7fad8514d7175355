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

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.gemm_autotune import ROW_BY_ROW, GemmKernel, kernel_for, row_by_row
from mrl.models.kernels.bindings import Packed


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
    ) -> None:
        self._stored = (weight, bias)
        self._scales = scales
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
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` allocates in addition to the stored weight."""
        weight, _ = self._stored
        copies = weight.dtype != self._dtype or (self._form is not None and self._form.copies)
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
            return F.linear(x_PI, self._weight, self._bias)
        return self._form(x_PI, self._weight, self._bias)


def packs(device: torch.device) -> bool:
    """Returns whether products on this device use measured kernels with packed weights."""
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device.type == "cpu" and on_x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
