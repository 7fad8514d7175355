"""The actor's forward pass with the native engine's functions (`mrl/models/kernels`), for `rollout.true_on_policy`.

Modules for Megatron's local layer spec whose results for each row are bit-identical to the engine's, independent of the
other rows in the batch: products, sums over tensor-parallel ranks, rotary embedding with attention, and the final
log-probabilities. Norms and the gated activation come from `megatron/cpu/layers.py` and are bit-identical too.
Gradients are the ordinary ones at these values and are not batch-invariant.

Shapes: P packed tokens, I inputs, O outputs, N heads and K KV heads of this rank, D head dim, S slots, H hidden, C rows
of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.distributed.collectives import sum_in_rank_order
from mrl.megatron.attention import CoreAttention, PackedSequences
from mrl.megatron.cpu.layers import CompiledMlp, replace_modules
from mrl.models.base import ArchSpec, rotary_kinds
from mrl.models.kernels.bindings import required
from mrl.models.kernels.rope_tables import rotary_tables, rotate

Tables = tuple[Tensor, Tensor]
"""(cos, sin) from `rotary_tables`."""


class BatchInvariantColumnParallel(ColumnParallelLinear):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's column-parallel linear layer with the engine's product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=options["tp_group"]
            )
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
        product: Tensor = _Product.apply(input, weight, options["bias"])  # type: ignore[no-untyped-call]
        return product


class BatchInvariantRowParallel(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel linear layer with the engine's product; partial products are summed in rank order."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Collective over tensor-parallel: returns (the product, None for the bias)."""
        partial = _Product.apply(input_, self.weight, None)  # type: ignore[no-untyped-call]
        return _RankSum.apply(partial, self.tp_group, self.sequence_parallel), None  # type: ignore[no-untyped-call]


class BatchInvariantMlp(CompiledMlp):
    """Gated MLP with the linear layers of this file."""

    linear = BatchInvariantColumnParallel, BatchInvariantRowParallel


class BatchInvariantAttention(CoreAttention):
    """Attention by the engine's functions: rotates queries and keys, then attends over all earlier slots.

    Args:
        *args: See `PackedAttention`.
        tables: Rotary tables of layers without a sliding window, and of layers with one.
        **options: See `PackedAttention`.
    """

    def __init__(self, *args: Any, tables: tuple[Tables, Tables], **options: Any) -> None:
        super().__init__(*args, **options)
        self._tables = tables[self.window is not None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Computes attention, see `PackedAttention.forward`; queries and keys are not rotated yet."""
        attended: Tensor = _EngineAttention.apply(query, key, value, plan, self)  # type: ignore[no-untyped-call]
        return attended

    def engine_attention(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Applies RoPE and computes attention with the engine's functions, not differentiable: [P, 1, N * D]."""
        compiled, heads = required(query.dtype), query.size(2)
        qkv = torch.cat([query, key, value], 2).squeeze(1)
        positions_P = plan.positions
        q_PND, *kv = compiled.rotate(qkv, positions_P, self._tables, None, heads, 0.0)
        if plan.keys is None:
            raise ValueError("attention takes sequences from `pack`")
        row_S = plan.keys.row_S
        # copies keys and values so that the slots of a sequence are contiguous
        keys, values = (x.transpose(0, 1).index_select(1, row_S).transpose(0, 1) for x in kv)
        attended = compiled.attend_at(
            q_PND, plan.row_to_first, positions_P, keys, values, window=self.window, ring=False, scale=self.scale
        )
        return attended.flatten(1)[:, None]

    def torch_attention(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Applies RoPE and computes attention with PyTorch's operators, differentiable; used for the backward pass."""
        positions_P = plan.positions
        cos, sin = (table[positions_P][:, None, None] for table in self._tables)
        query, key = (rotate(x, cos, sin) for x in (query, key))
        return super().attend(query, key, value, plan)


class BatchInvariantHead:
    """Output layer: logits and log-probabilities with this rank's part of the output weight.

    Args:
        weight_VH: Output weight of this rank, padding rows included.
        vocab_size: Size of the full vocabulary, without padding.
        group: Tensor-parallel ranks.
    """

    def __init__(self, weight_VH: Tensor, vocab_size: int, group: dist.ProcessGroup) -> None:
        self._compiled = required(weight_VH.dtype)
        self._packed = self._compiled.pack(weight_VH.detach())
        self._num_rows, self._vocab_size, self._group = weight_VH.size(0), vocab_size, group

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Returns this rank's columns of the logits, padding included, in the dtype of the weight."""
        return self._compiled.product(hidden_CH, self._packed, None, self._num_rows)

    def full_logits(self, logits_CV: Tensor) -> Tensor:
        """Collective over tensor-parallel: returns the columns of all ranks, without padding."""
        size = dist.get_world_size(self._group)
        if size > 1:
            parts = [torch.empty_like(logits_CV) for _ in range(size)]
            dist.all_gather(parts, logits_CV, group=self._group)
            logits_CV = torch.cat(parts, 1)
        return logits_CV[:, : self._vocab_size]

    def logprobs(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
        """Returns log softmax(logits / temperature) of the targets, fp32 [C]."""
        return required(logits_CV.dtype).score(logits_CV, targets_C, temperature)


def batch_invariant_layer(layer: ModuleSpec, tables: tuple[Tables, Tables], *, qk_norm: bool) -> ModuleSpec:
    """Replaces modules of a dense model's local layer spec, in place, by those of this file."""
    attention = ModuleSpec(module=BatchInvariantAttention, params={"tables": tables})
    return replace_modules(
        layer, (BatchInvariantColumnParallel, BatchInvariantRowParallel), attention, BatchInvariantMlp, qk_norm=qk_norm
    )


def engine_rotary_tables(arch: ArchSpec, num_positions: int, dtype: torch.dtype) -> tuple[Tables, Tables]:
    """Returns the engine's RoPE tables on the CPU: those of layers without a sliding window, and of layers with one."""
    everywhere, windowed = rotary_kinds(arch)
    tables = rotary_tables(everywhere, num_positions, dtype, torch.device("cpu"))
    if windowed is everywhere:
        return tables, tables
    return tables, rotary_tables(windowed, num_positions, dtype, torch.device("cpu"))


class _Product(torch.autograd.Function):
    """Linear layer x weight^T + bias for rows [..., I], with the engine's product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        compiled = required(x.dtype)
        out = compiled.product(x.reshape(-1, x.size(-1)), compiled.pack(weight), bias, weight.size(0))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_PO = grads[0].reshape(-1, grads[0].size(-1))
        grad_weight = grad_PO.T @ x.reshape(-1, x.size(-1))
        return (grad_PO @ weight).view(x.shape), grad_weight, grad_PO.sum(0) if ctx.has_bias else None


class _RankSum(torch.autograd.Function):
    """Sum of partial results over ranks; under sequence parallelism this rank's rows of it."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter
        total = sum_in_rank_order(partial, group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone() if scatter else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        if ctx.scatter:
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
            dist.all_gather(parts, grad, group=ctx.group)
            grad = torch.cat(parts)
        return grad, None, None


class _EngineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences, attention: BatchInvariantAttention
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.attention = plan, attention
        return attention.engine_attention(query, key, value, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            found = torch.autograd.grad(ctx.attention.torch_attention(*inputs, ctx.plan), inputs, grads[0])
        return *found, None, None
