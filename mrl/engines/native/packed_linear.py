"""Matrix products with few rows, over a weight that is packed once for each refit.

Owns the choice of compute dtype and the packed copies of weights. On CUDA nothing is copied but FP8. On an x86 CPU a
product has the form that was measured to be the fastest for its shape (`forms`), at the price of one more copy of most
matrices; the form is the same for any number of rows, on every rank and in every run of this machine: a run that goes
on must have the numbers of one that never stopped. A CPU without bfloat16 instructions multiplies bfloat16 many times
slower than float32, so there the copy is float32, and so are activations and KV cache. With `rollout.true_on_policy`
all this gives way to the one form by which the actor computes too.

A weight that is stored in FP8 is multiplied with its scales once for each refit, into a copy on every device: products
are those of the weights that were quantised, with activations that are not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.gemm_autotune import ROW_BY_ROW, Form, form_of, row_by_row
from mrl.models.kernels.library import Packed


def compute_dtype(dtype: torch.dtype, device: torch.device, *, exact: bool = False) -> torch.dtype:
    """The dtype of activations for stored weights of `dtype`; `exact`: as the actor's are."""
    if not exact and device.type == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return dtype


class Linear:
    """x -> x weight^T + bias.

    Args:
        weight: Stored weight [out, in]; updates in place are seen after `refresh`.
        bias: Stored bias [out].
        dtype: Of the product.
        scales: Of a weight that is stored in FP8.
        exact: In the form by which the actor computes too.
        compiled: The form may be one that the job compiles.
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
        self._form: Form | None = None
        if exact:
            self._form = row_by_row(weight.size(0), dtype)
        elif packs(weight.device):
            self._form = form_of(tuple(weight.shape), dtype, compiled=compiled)
        self._weight, self._bias = weight, bias
        self._packed: Tensor | None = None
        self._copy: Tensor | None = None

    @property
    def copy(self) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of the copy of the weight for which `copy_into` may give memory; None: there is none."""
        weight, _ = self._stored
        return (weight.shape, self._dtype) if self._form is None and weight.dtype != self._dtype else None

    def copy_into(self, memory: Tensor) -> None:
        """Makes `refresh` write the copy of the weight there; what is captured of it stays valid."""
        self._copy = memory

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a product reads."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` takes beside the stored weight."""
        weight, _ = self._stored
        copies = weight.dtype != self._dtype or (self._form is not None and self._form.copies)
        return weight.numel() * self._dtype.itemsize if copies else 0

    @property
    def num_inputs(self) -> int:
        """Columns of the stored weight."""
        return self._stored[0].size(1)

    @property
    def row_by_row(self) -> Packed | None:
        """Weight and bias as `Library.product` takes them, where that is the form of the product."""
        if self._form is None or self._form.name != ROW_BY_ROW:
            return None
        return self._weight, self._bias

    def refresh(self) -> None:
        """Takes in the stored values."""
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

    def forget(self) -> None:
        """Lets go of the copies that `refresh` made."""
        self._weight, self._bias = self._stored
        self._packed = None

    def __call__(self, x_PI: Tensor) -> Tensor:
        """The product [P, out]."""
        if self._form is None:
            return F.linear(x_PI, self._weight, self._bias)
        return self._form(x_PI, self._weight, self._bias)


def packs(device: torch.device) -> bool:
    """Whether products have a form of their own."""
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device.type == "cpu" and on_x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
