"""FP8 training emulated on a CPU: linear layers of Megatron's local spec multiply operands that were rounded to FP8.

Operands are quantized and dequantized in fp32 and multiplied in fp32, so a product is that of FP8 kernels except for
the order of additions. TransformerEngine quantizes some operands of the backward a second time, in blocks along their
other dimension; the emulation rounds every operand once, in the blocks of the forward. Weights, gradient buffers,
embedding, attention, norms and the output layer stay in the model's dtype, as in Megatron.

Shapes: M x N a matrix, n rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.config.megatron_fields.fp8 import Fp8Training
from mrl.errors import UserError, to_install
from mrl.megatron.cpu.layers import accumulate_weight_gradient, rows_times
from mrl.models.base import ArchSpec
from mrl.resharding.fp8_quantize import MAX_MULTIPLIER

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: all of a matrix."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """Choice of scales.

    Attributes:
        rows: Block of inputs and of gradients of outputs.
        weights: Block of weights.
        power_of_two: True if scales are powers of two, as E8M0 stores them.
    """

    rows: Block
    weights: Block
    power_of_two: bool = False


RECIPES = {
    "tensorwise": Recipe(None, None),
    "blockwise": Recipe((1, 128), (128, 128)),
    "mxfp8": Recipe((1, 32), (1, 32), power_of_two=True),
}
"""Value of `fp8_recipe` -> choice of scales."""


def rounded_to_fp8(values_MN: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool = False) -> Tensor:
    """Returns values quantized to FP8 with one scale per block, and dequantized; fp32.

    The largest magnitude of a block becomes the largest finite value of `dtype`, or at most that with powers of two.

    Args:
        values_MN: Matrix, any float dtype; not empty.
        block: Rows and columns that share a scale; blocks at the ends may be smaller.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: True if scales are powers of two.
    """
    (num_rows, num_columns), largest = values_MN.shape, torch.finfo(dtype).max
    rows, columns = block or (num_rows, num_columns)
    padded = F.pad(values_MN.float(), (0, -num_columns % columns, 0, -num_rows % rows))
    blocks = padded.view(padded.size(0) // rows, rows, padded.size(1) // columns, columns)
    magnitudes = blocks.abs().amax((1, 3), keepdim=True)
    if power_of_two:
        exponents = torch.where(magnitudes > 0, (magnitudes / largest).log2().ceil(), 0.0).clamp(-126, 126)
        multipliers = torch.exp2(-exponents)
    else:
        multipliers = torch.where(magnitudes > 0, magnitudes.reciprocal() * largest, 1.0).clamp_max(MAX_MULTIPLIER)
    stored = (blocks * multipliers).clamp_(-largest, largest).to(dtype)
    return (stored.float() * multipliers.reciprocal()).view(padded.shape)[:num_rows, :num_columns]


def check_emulation(arch: ArchSpec, device: torch.device | None) -> None:
    """Checks that FP8 can be emulated where TransformerEngine's layers are not used.

    Args:
        arch: Architecture of the model.
        device: Device of the model; None: a CPU.

    Raises:
        UserError: The device is a GPU, or the model has experts.
    """
    if device is not None and device.type != "cpu":
        problem = f"needs TransformerEngine, which is not in use. Install it ({to_install('gpu')}; see README)"
    elif arch.moe is not None:
        problem = "is emulated on a CPU, without experts: use a dense model, or a GPU"
    else:
        return
    refusal = UserError(f"megatron.transformer.fp8 {problem}.")
    refusal.on_all_ranks = True
    raise refusal


def emulate_fp8(chunk: torch.nn.Module, settings: Fp8Training) -> None:
    """Replaces the products of a chunk's linear layers, except in the layers that stay unquantized.

    Raises:
        UserError: The recipe has no emulation.
    """
    if settings.recipe not in RECIPES:
        raise UserError(
            f"megatron.transformer.fp8_recipe={settings.recipe} has no emulation on a CPU: use one of "
            f"{', '.join(RECIPES)}."
        )
    decoder: Any = chunk.decoder
    for layer in decoder.layers:
        number = layer.layer_number  # from 1, over all pipeline stages
        if settings.first_plain < number <= decoder.config.num_layers - settings.last_plain:
            for module in layer.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    module._forward_impl = partial(_product, settings)


def _product(
    settings: Fp8Training,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    **unused: Any,
) -> Tensor:
    """Collective over tensor-parallel: returns the product, as Megatron's layers call it."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    group = tp_group if allreduce_dgrad else None
    product: Tensor = _Fp8Product.apply(input, weight, bias, group, settings)  # type: ignore[no-untyped-call]
    return product


class _Fp8Product(torch.autograd.Function):
    """x weight^T + bias of rounded operands, for rows [..., I]; the gradient of x is summed over the group.

    The operands are saved unrounded, like those of an ordinary product, and rounded again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        settings: Fp8Training,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # looked up here: a recomputed forward runs inside the backward, where the buffer is the same
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.parameter, ctx.group, ctx.settings = weight, group, settings
        ctx.has_bias = bias is not None and bias.requires_grad
        x_nI, weight_OI = _rounded_rows(x, settings.recipe), _rounded_weight(weight, settings.recipe)
        product = rows_times(x_nI, weight_OI, None if bias is None else bias.float())
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe = RECIPES[ctx.settings.recipe]
        exact_nO = grads[0].reshape(-1, grads[0].size(-1))
        grad_nO = rounded_to_fp8(
            exact_nO, recipe.rows, E5M2 if ctx.settings.format == "hybrid" else E4M3, power_of_two=recipe.power_of_two
        )
        weight_OI = _rounded_weight(weight, ctx.settings.recipe)
        grad_x = rows_times(grad_nO, weight_OI.T, None).to(grads[0].dtype).view(*grads[0].shape[:-1], -1)
        sent = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = None
        if x is not None:
            x_nI = _rounded_rows(x, ctx.settings.recipe)
            summed = accumulate_weight_gradient(ctx.parameter, ctx.main_grad, grad_nO, x_nI)
            grad_weight = summed.to(weight.dtype)
        grad_bias = exact_nO.sum(0) if ctx.has_bias else None
        if sent is not None:
            sent.wait()
        return grad_x, grad_weight, grad_bias, None, None


def _rounded_rows(x: Tensor, recipe: str) -> Tensor:
    """Returns the rounded rows [n, I] of x [..., I]."""
    found = RECIPES[recipe]
    return rounded_to_fp8(x.reshape(-1, x.size(-1)), found.rows, E4M3, power_of_two=found.power_of_two)


def _rounded_weight(weight_OI: Tensor, recipe: str) -> Tensor:
    """Returns the rounded weight."""
    found = RECIPES[recipe]
    return rounded_to_fp8(weight_OI, found.weights, E4M3, power_of_two=found.power_of_two)
