"""Megatron's local layer spec on a CPU, with compiled operations (`mrl/models/kernels/training.py`).

Owns these modules: norms, the gated activation, attention with its rotation, and products whose weight gradients are
added to Megatron's buffer where they are computed. Where nothing can be compiled, PyTorch's operators compute the same
(`norm.py`, `attention.py`).

Shapes: n rows of a rank, I inputs, O outputs, N heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.algorithms.functional.logprobs import AddsGradient
from mrl.errors import UserError
from mrl.megatron.attention import PackedAttention, PackedSequences, of_all_ranks
from mrl.megatron.norm import RMSNorm
from mrl.models.kernels import build, machine
from mrl.models.kernels.library import library
from mrl.models.kernels.training import training


def compiles(dtype: torch.dtype) -> bool:
    """Whether all ranks of the job compute with these modules.

    Raises:
        UserError: Another rank compiles, and here that cannot be: tensor-parallel ranks would round otherwise.
    """
    found, problem = library(dtype)
    if machine.agreed(f"training/{dtype}", "plain" if found is None else "compiled") == "plain":
        return False
    if found is None:
        raise UserError(
            f"another rank compiles what the actor does between products; this one cannot: {problem}. Copies of a "
            f"weight would drift apart: install a C compiler ({', '.join(build.COMPILERS)}) here."
        )
    return True


def compiled_layer(layer: ModuleSpec, *, qk_norm: bool, moe: bool) -> ModuleSpec:
    """Megatron's local layer spec, its parts exchanged for those of this file; experts stay Megatron's."""
    return exchanged(layer, (Column, Row), Attention, None if moe else GatedMlp, qk_norm=qk_norm)


def exchanged(
    layer: ModuleSpec, linear: tuple[type, type], core: type | ModuleSpec, mlp: type | None, *, qk_norm: bool
) -> ModuleSpec:
    """A local layer spec with other parts, and the norms of this file.

    Args:
        layer: Megatron's; it is changed.
        linear: Around attention: what has its outputs cut over tensor-parallel ranks, and what has its inputs.
        core: Attention between them.
        mlp: None: it stays.
        qk_norm: Whether queries and keys are normed.
    """
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = linear
    attention.core_attention = core
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if mlp is not None:
        parts.mlp = mlp
    return layer


class Norm(RMSNorm):
    """The root-mean-square norm."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._compiled = training(config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The normed rows, in the dtype of `x`."""
        return self._compiled.norm(x, self.weight, self.eps)


class Column(ColumnParallelLinear):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's layer whose outputs are cut over tensor-parallel ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _product(super()._forward_impl, input, weight, options)


class Row(RowParallelLinear):  # type: ignore[misc]
    """Megatron's layer whose inputs are cut over tensor-parallel ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _product(super()._forward_impl, input, weight, options)


class GatedMlp(MLP):  # type: ignore[misc]
    """down(silu(gate x) * up x)."""

    linear: ClassVar[tuple[type, type]] = Column, Row

    def __init__(self, config: Any, **options: Any) -> None:
        layers = MLPSubmodules(linear_fc1=self.linear[0], linear_fc2=self.linear[1])
        super().__init__(config, layers, ffn_hidden_size=config.ffn_hidden_size, **options)
        self._compiled = training(config.params_dtype)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Collective over tensor-parallel: (the output, no bias)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        output, bias = self.linear_fc2(self._compiled.gate(gate_up))
        return output, bias


class Attention(PackedAttention):
    """Compiled, of queries and keys that it turns first."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._compiled = training(config.params_dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """See `PackedAttention.forward`; queries and keys come without their angles, which the plan has."""
        if plan.families is None or plan.angles is None:
            raise ValueError("attention takes sequences from `pack`, with their angles")
        angles = plan.angles
        q_PND, k_PKD = (self._compiled.turn(x.squeeze(1), angles) for x in (query, key))
        v_PKD = value.squeeze(1)
        if plan.group is not None:
            k_PKD, v_PKD = (of_all_ranks(x.flatten(1), plan.group).view(-1, *x.shape[1:]) for x in (k_PKD, v_PKD))
        attended = self._compiled.attention(q_PND, k_PKD, v_PKD, plan.families, self.scale_of(query))
        return attended.flatten(1)[:, None]


def _product(whole: Any, input: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Of rows that are all here; where sequence parallelism gathers them, Megatron's own (`whole`)."""
    if options["sequence_parallel"]:
        product: Tensor = whole(input, weight, **options)
    else:
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        product = _Product.apply(input, weight, options["bias"], group)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """x weight^T + bias of rows [..., I]; the gradient of x is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # looked up here: a recomputed forward runs inside the backward, where the buffer is the same
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.parameter, ctx.has_bias, ctx.group = weight, bias is not None, group
        return rows_times(x.reshape(-1, x.size(-1)), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_PO = grads[0].reshape(-1, grads[0].size(-1))
        grad_x = rows_times(grad_PO, weight.T, None).view(x.shape)
        sent = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = _added(ctx.parameter, ctx.main_grad, grad_PO, x.reshape(-1, x.size(-1)))
        grad_bias = grad_PO.sum(0) if ctx.has_bias else None
        if sent is not None:
            sent.wait()
        return grad_x, grad_weight, grad_bias, None


def rows_times(x_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """X weight^T + bias; of fp32 by the library that is faster on this processor."""
    by = ONEDNN if x_PI.dtype == torch.float32 and _by_onednn() else MATMUL
    return PRODUCTS[by](x_PI, weight_OI, bias_O)


def _onednn(x_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Packs the weight first, and a transposed one before that."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x_PI.contiguous(), weight_OI.contiguous(), bias_O, "none", [], ""
    )
    return product


ONEDNN, MATMUL = "onednn", "matmul"
MARGIN = 0.9
"""The other one must take at most this part of oneDNN's time: noise does not turn what decides the last bits."""

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    ONEDNN: _onednn,
    MATMUL: torch.nn.functional.linear,
}


@cache
def _by_onednn() -> bool:
    """Else by what is behind `matmul`; measured once on a machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    name = f"products/{machine.key(machine.processor(), torch.__version__)}/float32-training"
    return machine.settled(name, "training/product", _faster, ONEDNN) == ONEDNN


def _faster() -> str:
    """Of a product and of the gradient of its rows."""
    rows, weight, grad = torch.ones(256, 512), torch.ones(1024, 512), torch.ones(256, 1024)

    def both(product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        product(rows, weight, None)
        product(grad, weight.T, None)

    times = machine.best_times({by: partial(both, product) for by, product in PRODUCTS.items()})
    return MATMUL if times[MATMUL] < MARGIN * times[ONEDNN] else ONEDNN


def _added(parameter: Tensor, main_grad: Tensor | None, grad_PO: Tensor, x_PI: Tensor) -> Tensor:
    """The weight's gradient, or, where Megatron has a buffer for it, a stand-in that its hook passes over."""
    if main_grad is None:
        return grad_PO.T @ x_PI
    _add_product(main_grad, grad_PO, x_PI)
    return _stand_in(parameter)


def adds_gradient(weight: Tensor) -> AddsGradient | None:
    """For the output weight, of which the last rows may be padding; None: Megatron has no buffer for it."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None

    def adds(grad_CV: Tensor, hidden_CH: Tensor) -> Tensor:
        _add_product(main_grad[: grad_CV.size(1)], grad_CV, hidden_CH)
        return _stand_in(weight)

    return adds


def _add_product(main_grad: Tensor, grad_PO: Tensor, x_PI: Tensor) -> None:
    if main_grad.dtype == x_PI.dtype:
        main_grad.addmm_(grad_PO.T, x_PI)
    else:
        main_grad.add_(grad_PO.T @ x_PI)


def _stand_in(parameter: Tensor) -> Tensor:
    """Of a gradient that is in Megatron's buffer already: its hook passes over it."""
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(parameter)
