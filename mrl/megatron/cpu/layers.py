"""Modules for Megatron's local layer spec on a CPU, with compiled kernels (`mrl/models/kernels/training.py`).

Norms, gated activation, attention with rotary embedding, and linear layers whose weight gradients are accumulated into
Megatron's buffer. If kernels cannot be compiled, PyTorch's operators compute the same (`norm.py`, `attention.py`).

Shapes: n rows of a rank, I inputs, O outputs, N heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.algorithms.functional.logprobs import AddsGradient
from mrl.errors import UserError
from mrl.megatron.attention import PackedAttention, PackedSequences, gather_cp
from mrl.megatron.norm import RMSNorm
from mrl.models.base import Activation
from mrl.models.kernels import build, build_cache
from mrl.models.kernels.bindings import load_library
from mrl.models.kernels.training import training_kernels


def compiles(dtype: torch.dtype) -> bool:
    """Returns whether all ranks of the job use these modules.

    Raises:
        UserError: Another rank compiles kernels but this one cannot: tensor-parallel ranks would round differently.
    """
    found, problem = load_library(dtype)
    if build_cache.first_rank_value(f"training/{dtype}", "plain" if found is None else "compiled") == "plain":
        return False
    if found is None:
        raise UserError(
            f"another rank uses compiled kernels for the actor, but this one cannot: {problem}. Replicated weights "
            f"would diverge: install a C compiler ({', '.join(build.COMPILERS)}) here."
        )
    return True


def compiled_layer(layer: ModuleSpec, *, qk_norm: bool, moe: bool) -> ModuleSpec:
    """Replaces modules of Megatron's local layer spec, in place, by those of this file; experts stay Megatron's."""
    return replace_modules(
        layer,
        (CompiledColumnParallel, CompiledRowParallel),
        CompiledAttention,
        None if moe else CompiledMlp,
        qk_norm=qk_norm,
    )


def replace_modules(
    layer: ModuleSpec,
    linear: tuple[type, type],
    core: type | ModuleSpec,
    mlp: type[CompiledMlp] | None,
    *,
    qk_norm: bool,
) -> ModuleSpec:
    """Replaces the linear layers, attention and norms of a local layer spec.

    Args:
        layer: Megatron's layer spec, changed in place.
        linear: Classes of the column-parallel and the row-parallel linear layer around attention.
        core: Core attention.
        mlp: Class of the MLP; None: unchanged.
        qk_norm: True if queries and keys are normalised.
    """
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = CompiledNorm
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = linear
    attention.core_attention = core
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = CompiledNorm
    if mlp is not None:
        # 0.18 and 0.19 call a builder, which their MLP class has as a method; older versions build a class
        parts.mlp = mlp.as_mlp_submodule if hasattr(MLP, "as_mlp_submodule") else mlp
    return layer


class CompiledNorm(RMSNorm):
    """RMSNorm with compiled kernels."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._compiled = training_kernels(config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised rows, in the dtype of `x`."""
        return self._compiled.norm(x, self.weight, self.eps, self.offset)


class CompiledColumnParallel(ColumnParallelLinear):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's column-parallel linear layer with this file's product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _product(super()._forward_impl, input, weight, options)


class CompiledRowParallel(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel linear layer with this file's product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _product(super()._forward_impl, input, weight, options)


class CompiledMlp(MLP):  # type: ignore[misc]
    """Gated MLP: down(activation(gate x) * up x)."""

    linear: ClassVar[tuple[type, type]] = CompiledColumnParallel, CompiledRowParallel

    def __init__(self, config: Any, **options: Any) -> None:
        layers = MLPSubmodules(linear_fc1=self.linear[0], linear_fc2=self.linear[1])
        known = {name: value for name, value in options.items() if name in ("tp_group", "name")}
        super().__init__(config, layers, ffn_hidden_size=config.ffn_hidden_size, **known)
        self._compiled = training_kernels(config.params_dtype)
        self._activation: Activation = "silu" if config.activation_func is F.silu else "gelu_tanh"

    @classmethod
    def as_mlp_submodule(cls, config: Any, pg_collection: Any = None, **options: Any) -> CompiledMlp:
        """Builds the MLP of a layer, as megatron-core 0.18 and 0.19 call it."""
        group = {} if pg_collection is None else {"tp_group": pg_collection.tp}
        return cls(config, **options, **group)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Collective over tensor-parallel: returns (the output, None for the bias)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        output, bias = self.linear_fc2(self._compiled.gate(gate_up, self._activation))
        return output, bias


class CompiledAttention(PackedAttention):
    """Attention with compiled kernels, which also rotate queries and keys."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._compiled = training_kernels(config.params_dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Computes attention, see `PackedAttention.forward`; queries and keys are not rotated yet."""
        if plan.prefix_mask is None:
            raise ValueError("attention takes sequences from `pack_compiled`")
        angles = plan.angles_of(self.window)
        q_PND, k_PKD = (self._compiled.apply_rope(x.squeeze(1), angles) for x in (query, key))
        v_PKD = value.squeeze(1)
        if plan.group is not None:
            k_PKD, v_PKD = (gather_cp(x.flatten(1), plan.group).view(-1, *x.shape[1:]) for x in (k_PKD, v_PKD))
        attended = self._compiled.attention(q_PND, k_PKD, v_PKD, plan.prefix_mask, self.scale_of(query), self.window)
        return attended.flatten(1)[:, None]


def _product(megatron_product: Any, input: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the product if this rank has all rows; with sequence parallelism, Megatron's own layer gathers them."""
    if options["sequence_parallel"]:
        product: Tensor = megatron_product(input, weight, **options)
    else:
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        product = _Product.apply(input, weight, options["bias"], group)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """Linear layer x weight^T + bias for rows [..., I]; the gradient of x is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # looked up here: a recomputed forward runs inside the backward, where the buffer is the same
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.parameter, ctx.has_bias, ctx.group = weight, bias is not None and bias.requires_grad, group
        product = rows_times(x.reshape(-1, x.size(-1)), weight, bias)
        # no view: adapters are added in place
        unviewed: Tensor = torch.ops.aten._unsafe_view(product, [*x.shape[:-1], weight.size(0)])
        return unviewed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_PO = grads[0].reshape(-1, grads[0].size(-1))
        grad_x = rows_times(grad_PO, weight.T, None).view(*grads[0].shape[:-1], -1)
        sent = None if ctx.group is None else dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = None
        if x is not None:
            grad_weight = accumulate_weight_gradient(ctx.parameter, ctx.main_grad, grad_PO, x.reshape(-1, x.size(-1)))
        grad_bias = grad_PO.sum(0) if ctx.has_bias else None
        if sent is not None:
            sent.wait()
        return grad_x, grad_weight, grad_bias, None


def rows_times(x_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Returns x weight^T + bias; in fp32 by the library that is faster on this processor."""
    by = ONEDNN if x_PI.dtype == torch.float32 and _by_onednn() else MATMUL
    return PRODUCTS[by](x_PI, weight_OI, bias_O)


def _onednn(x_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes the product with oneDNN, which first packs the weight (and transposes it, if transposed)."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x_PI.contiguous(), weight_OI.contiguous(), bias_O, "none", [], ""
    )
    return product


ONEDNN, MATMUL = "onednn", "matmul"
MARGIN = 0.9
"""Fraction of oneDNN's time below which matmul is chosen; noise must not change the choice, which affects the last
bits."""

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    ONEDNN: _onednn,
    MATMUL: torch.nn.functional.linear,
}


@cache
def _by_onednn() -> bool:
    """Returns whether oneDNN computes fp32 products instead of `matmul`; measured once per machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    name = f"products/{build_cache.key(build_cache.processor(), torch.__version__)}/float32-training"
    return build_cache.measure_once(name, "training/product", _faster, ONEDNN) == ONEDNN


def _faster() -> str:
    """Times a product and the gradient of its rows with both libraries."""
    rows, weight, grad = torch.ones(256, 512), torch.ones(1024, 512), torch.ones(256, 1024)

    def both(product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        product(rows, weight, None)
        product(grad, weight.T, None)

    times = build_cache.best_times({by: partial(both, product) for by, product in PRODUCTS.items()})
    return MATMUL if times[MATMUL] < MARGIN * times[ONEDNN] else ONEDNN


def accumulate_weight_gradient(parameter: Tensor, main_grad: Tensor | None, grad_PO: Tensor, x_PI: Tensor) -> Tensor:
    """Returns the weight's gradient, or a placeholder if it was added to Megatron's buffer."""
    if main_grad is None:
        return grad_PO.T @ x_PI
    _add_product(main_grad, grad_PO, x_PI)
    return _placeholder_gradient(parameter)


def adds_gradient(weight: Tensor) -> AddsGradient | None:
    """Returns a function that accumulates the output weight's gradient in Megatron's buffer; None without a buffer.

    The last rows of the weight may be padding.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None

    def adds(grad_CV: Tensor, hidden_CH: Tensor) -> Tensor:
        _add_product(main_grad[: grad_CV.size(1)], grad_CV, hidden_CH)
        return _placeholder_gradient(weight)

    return adds


def _add_product(main_grad: Tensor, grad_PO: Tensor, x_PI: Tensor) -> None:
    if main_grad.dtype == x_PI.dtype:
        main_grad.addmm_(grad_PO.T, x_PI)
    else:
        main_grad.add_(grad_PO.T @ x_PI)


def _placeholder_gradient(parameter: Tensor) -> Tensor:
    """Returns a placeholder gradient, marked so that Megatron's hook ignores it."""
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(parameter)
