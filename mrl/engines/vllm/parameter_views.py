"""vLLM's own parameters as the engine's layout sees them: where a refit writes.

Owns the way from a name of `resharding/vllm.py` to the storage that vLLM computes with, and the packing of experts on a
CPU, whose kernel reads them in an order of its own (vLLM's `reload_weights` leaves that out).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mrl.engines.vllm.engine_fields import INSTALL
from mrl.errors import UserError
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice

PLAIN_KERNELS = ("TRITON", "CPU", "TritonFp8BlockScaledMMKernel")
"""vLLM's kernels that read what a refit writes: for experts, the second after `Storage.pack`; for matrices in FP8."""

ROUTED = ".routed_experts."
"""Part of the names of experts in some versions."""


class Storage:
    """Parameters of this rank's part of the model, by the layout's names.

    Args:
        model: vLLM's.
        layout: What it must store.
        version: Of vLLM, for messages.

    Raises:
        UserError: vLLM stores something else.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, version: str) -> None:
        found = {name.replace(ROUTED, "."): value.data for name, value in model.named_parameters()}
        missing, strange = layout.keys() - found.keys(), found.keys() - layout.keys()
        if missing or strange:
            raise UserError(
                f"vLLM {version} stores other weights than mrl knows of: it lacks {_some(missing)} and has "
                f"{_some(strange)} besides. {INSTALL}"
            )
        self._tensors: dict[str, Tensor] = {}
        for name, stored in layout.items():
            tensor = found[name]
            wanted = stored.shape
            if tensor.dim() == len(wanted) + 1:  # experts: [experts, rows, columns]
                tensor = tensor.view(-1, tensor.size(-1)) if tensor.is_contiguous() else tensor
            if tuple(tensor.shape) != wanted:
                raise UserError(
                    f"vLLM {version} stores '{name}' as {list(found[name].shape)}, mrl expects {list(wanted)}. Where "
                    "these are experts, vLLM's kernel for CPUs pads the width of a rank's part to a multiple of 32: "
                    "choose rollout.tensor_model_parallel_size so that it is one, or use rollout.name=native."
                )
            if tensor.dtype != DTYPES[stored.dtype]:
                raise UserError(
                    f"vLLM {version} stores '{name}' in {str(tensor.dtype).removeprefix('torch.')}, mrl expects "
                    f"{stored.dtype}. {INSTALL}"
                )
            self._tensors[name] = tensor
        _check_kernels(model, version)
        self._packed = list(_packed_experts(model))

    def write(self, item: WeightSlice) -> None:
        """Copies a slice into place.

        Raises:
            RuntimeError: There is no such tensor, or the slice does not fit it.
        """
        stored = self._tensors.get(item.name)
        if stored is None:
            raise RuntimeError(f"'{item.name}' is not a tensor of the engine")
        item.write_to(stored)

    def checksum(self) -> int:
        """Sum over the bits of all that is stored."""
        return sum(bit_sum(tensor) for tensor in self._tensors.values()) % MODULUS

    def pack(self) -> None:
        """Puts experts into the order that a CPU's kernel reads, in the same storage; nothing on a GPU."""
        for weight, isa in self._packed:
            from vllm import _custom_ops

            for experts in torch.split(weight, torch.get_num_threads()):  # few enough to stay in the processor's cache
                experts.copy_(_custom_ops.cpu_prepack_moe_weight(experts, isa))

    def forget(self) -> None:
        """Lets go of the parameters."""
        self._tensors.clear()
        self._packed.clear()


def _check_kernels(model: torch.nn.Module, version: str) -> None:
    """Raises UserError where a kernel keeps weights in an order that a refit does not write."""
    layer: Any
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
        matrix = getattr(method, "fp8_linear", None)
        kernel = experts.name if experts is not None else type(matrix).__name__ if matrix is not None else None
        if kernel is not None and kernel not in PLAIN_KERNELS:
            raise UserError(
                f"vLLM {version} multiplies {'experts' if experts is not None else 'matrices in FP8'} with {kernel}, "
                "which keeps them in an order of its own, where mrl writes them for "
                f"{' or '.join(PLAIN_KERNELS)}. {INSTALL}"
            )


def _packed_experts(model: torch.nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Each matrix of experts that vLLM packed when it loaded, with the kernel's order."""
    layer: Any
    for layer in model.modules():
        kernel: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        isa = getattr(getattr(kernel, "fused_experts", None), "isa", None)
        if isa is not None and hasattr(layer, "w13_weight"):
            for weight in (layer.w13_weight, layer.w2_weight):
                yield weight.data, isa


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(f"'{name}'" for name in shown) + (", ..." if len(names) > 3 else "") if names else "nothing"
