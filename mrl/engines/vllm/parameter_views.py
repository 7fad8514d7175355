"""Views of vLLM's own parameters under the names of `resharding/vllm.py`, into which weight sync writes.

Also packs experts on a CPU, whose kernel reads them in its own order (vLLM's `reload_weights` does not do that), and
updates the matrices of latent attention, which vLLM derives from `kv_b_proj` when it loads.
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
from mrl.resharding.vllm import ALTERNATING
from mrl.resharding.weight_slice import WeightSlice

PLAIN_KERNELS = ("TRITON", "CPU", "TritonFp8BlockScaledMMKernel")
"""vLLM's kernels that read weights in the layout that weight sync writes: two for experts (CPU after
`ParameterViews.pack`), one for FP8 matrices."""

ROUTED = ".routed_experts."
"""Part of the names of experts in some versions."""
ADAPTED = ".base_layer."
"""Part of the names of weights in layers with low-rank adapters."""


DERIVED = (".W_UK_T", ".W_UV")
"""Ends of the names of matrices that vLLM derives from a weight."""


class ParameterViews:
    """Parameters of this rank's part of the model, by the layout's names.

    Args:
        model: vLLM's model.
        layout: Expected tensors.
        version: Version of vLLM, for messages.

    Raises:
        UserError: vLLM's parameters differ from the layout.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, version: str) -> None:
        found = {
            name.replace(ROUTED, ".").replace(ADAPTED, "."): value.data
            for name, value in model.named_parameters()
            if not name.endswith(DERIVED)
        }
        owners = {name: name.partition("[")[0] for name in layout}
        missing, strange = set(owners.values()) - found.keys(), found.keys() - set(owners.values())
        if missing or strange:
            raise UserError(
                f"vLLM {version} stores other weights than mrl expects: it lacks {_some(missing)} and additionally has "
                f"{_some(strange)}. {INSTALL}"
            )
        self._tensors: dict[str, Tensor] = {}
        for name, stored in layout.items():
            tensor = found[owners[name]]
            wanted = stored.shape
            if tensor.dim() == len(wanted) + 1:  # experts: [experts, rows, columns], or biases [experts, rows]
                tensor = tensor.flatten(0, 1) if tensor.is_contiguous() else tensor
            if name.endswith(ALTERNATING):
                tensor = tensor[ALTERNATING.index(name[name.index("[") :]) :: 2]
            if tuple(tensor.shape) != wanted:
                raise UserError(
                    f"vLLM {version} stores '{name}' as {list(tensor.shape)}, mrl expects {list(wanted)}. If "
                    "these are experts, vLLM's CPU kernel pads the width of a rank's shard to a multiple of 32: choose "
                    "rollout.tensor_model_parallel_size so that it is one, or use rollout.name=native."
                )
            if tensor.dtype != DTYPES[stored.dtype]:
                raise UserError(
                    f"vLLM {version} stores '{name}' in {str(tensor.dtype).removeprefix('torch.')}, mrl expects "
                    f"{stored.dtype}. {INSTALL}"
                )
            self._tensors[name] = tensor
        _check_kernels(model, version)
        self._packed = list(_packed_experts(model))
        self._latent: list[Any] = [layer for layer in model.modules() if hasattr(layer, "W_UV")]

    def write(self, item: WeightSlice) -> None:
        """Copies a slice into its parameter.

        Raises:
            RuntimeError: There is no such tensor, or the slice does not fit it.
        """
        stored = self._tensors.get(item.name)
        if stored is None:
            raise RuntimeError(f"'{item.name}' is not a tensor of the engine")
        item.write_to(stored)

    def checksum(self) -> int:
        """Returns the sum over the bits of all parameters."""
        return sum(bit_sum(tensor) for tensor in self._tensors.values()) % MODULUS

    def pack(self) -> None:
        """Reorders experts for a CPU's kernel, and derives matrices again, both in the same storage."""
        for layer in self._latent:
            layer.process_weights_after_loading(layer.W_UV.dtype)
        for weight, isa in self._packed:
            from vllm import _custom_ops

            for experts in torch.split(weight, torch.get_num_threads()):  # few enough for the processor's cache
                experts.copy_(_custom_ops.cpu_prepack_moe_weight(experts, isa))

    def forget(self) -> None:
        """Drops the references to the parameters."""
        self._tensors.clear()
        self._packed.clear()
        self._latent.clear()


def _check_kernels(model: torch.nn.Module, version: str) -> None:
    """Raises UserError if a kernel uses another weight order than weight sync writes."""
    layer: Any
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
        matrix = getattr(method, "fp8_linear", None)
        kernel = experts.name if experts is not None else type(matrix).__name__ if matrix is not None else None
        if kernel is not None and kernel not in PLAIN_KERNELS:
            raise UserError(
                f"vLLM {version} multiplies {'experts' if experts is not None else 'matrices in FP8'} with {kernel}, "
                f"which reorders them; mrl supports {' or '.join(PLAIN_KERNELS)}. {INSTALL}"
            )


def _packed_experts(model: torch.nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yields each expert matrix that vLLM packed when it loaded, with the kernel's instruction set."""
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
