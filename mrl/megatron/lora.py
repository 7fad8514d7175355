"""Low-rank adapters (LoRA) on the linear layers of a model's chunks.

A pair lora_A, lora_B is registered as parameters of the linear module whose weight it adapts, and a forward hook adds
scale * lora_B lora_A x to the module's output. So the modules stay Megatron's (local, compiled or TransformerEngine's),
and the other parameters keep their names. `resharding/lora.py` says which matrices have adapters and how they are cut.

The hook leaves the output in the state in which the module leaves it: complete, this rank's rows (sequence
parallelism), or a partial sum that a MoE dispatcher completes (expert tensor parallelism). Only the [tokens, r]
products travel:

- Cut by rows: lora_A is complete on each rank. The gradient of lora_A x is summed over the ranks; with sequence
  parallelism lora_A x is gathered, each rank's gradient of lora_A covers its own tokens, and Megatron sums it
  (attribute `sequence_parallel`).
- Cut by columns: lora_A x is summed over the ranks; lora_B is complete on each rank. With sequence parallelism the sum
  is scattered, and Megatron sums the gradient of lora_B.
- Partial sums: nothing is exchanged; the gradient of the adapter that every rank has complete is summed by
  `sum_partial_gradients`.

Shapes: n tokens, I inputs and O outputs of this rank, r the rank of the adapters, M adapted projections of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn

from mrl.config.config import LoraConfig
from mrl.distributed.groups import ProcessGroups
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout
from mrl.resharding.lora import (
    WEIGHT,
    TrainedMatrix,
    adapted_matrices,
    adapter_layout,
    adapter_name,
    modules_hash,
    scale_of,
)
from mrl.resharding.megatron import OUTPUT

PARTIAL = "lora_gradient_is_partial"
"""Attribute of adapters whose gradient must be summed over the ranks that share an expert."""


class Adapters:
    """The adapters of a model on this rank.

    Attributes:
        matrices: Matrices with adapters, in the order of the chunks.
        scale: Factor of the product of a pair.
        enabled: False where the model computes without adapters.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        arch: ArchSpec,
        groups: ProcessGroups,
        lora: LoraConfig,
        *,
        dtype: str,
        te: bool,
    ) -> None:
        """Freezes the chunks' parameters, except a value head, and adds adapters, which are NaN until they are filled.

        Must be called before the chunks are wrapped for data parallelism.

        Args:
            chunks: Model chunks by virtual stage.
            arch: Architecture of the model.
            groups: Process groups of the layout.
            lora: Config section; `rank` is above 0.
            dtype: Dtype of the adapters, "float32" or "bfloat16".
            te: True if the layers are TransformerEngine's.
        """
        self._arch, self.lora, self.scale, self.enabled = arch, lora, scale_of(lora), True
        self.matrices = adapted_matrices(arch, groups.grid, groups.rank, lora, dtype=dtype, te=te)
        self._chunks = chunks
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(arch.value_head and name == OUTPUT)
        modules = {
            f"chunk{index}.{name}": module for index, c in enumerate(chunks) for name, module in c.named_modules()
        }
        by_module: dict[str, list[TrainedMatrix]] = {}
        for matrix in self.matrices:
            by_module.setdefault(matrix.weight.rpartition(WEIGHT)[0], []).append(matrix)
        for name, matrices in by_module.items():
            module = modules[name]
            for matrix in matrices:
                self._register(module, matrix, dtype)
            module.register_forward_hook(partial(self._add_products, matrices))

    def layout(self) -> Layout:
        """Returns the layout of this rank's adapters, in the coordinates of PEFT's files."""
        return adapter_layout(self.matrices)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns this rank's adapters, named as in `layout`."""
        parameters = {
            f"chunk{index}.{name}": parameter
            for index, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
        }
        return {name: parameters[name] for name in self.layout()}

    def describe(self) -> dict[str, Any]:
        """Returns the settings that adapters of another run must share, as JSON values."""
        lora = self.lora
        return {
            "rank": lora.rank,
            "scale": self.scale,
            "modules": modules_hash(self._arch, lora),
            "target_modules": sorted(lora.target_modules),
            "exclude_modules": sorted(lora.exclude_modules),
        }

    def sharded_state_dict(self, chunk: int, dense: dist.ProcessGroup) -> dict[str, Any]:
        """Returns a chunk's adapters for `dist_checkpointing`: parameter name inside the chunk -> sharded tensor.

        Args:
            chunk: Index of the chunk.
            dense: Ranks that have the same dense parameters.
        """
        state, parameters = {}, self.named_parameters()
        for matrix in self.matrices:
            place = matrix.tensor
            if place.chunk != chunk:
                continue
            stem = place.spec.megatron.format(layer=place.layer, expert=place.expert)
            if matrix.is_expert:
                cut = parallel_state.get_expert_tensor_parallel_group()
                replicas = parallel_state.get_expert_data_parallel_group()
            else:
                cut, replicas = parallel_state.get_tensor_model_parallel_group(), dense
            by_columns = matrix.is_cut_by_columns
            for name, axis in ((matrix.a_name, 1 if by_columns else None), (matrix.b_name, None if by_columns else 0)):
                which = "lora_A" if name == matrix.a_name else "lora_B"
                copy = 0 if axis is not None else cut.rank()
                tensor = ShardedTensor.from_rank_offsets(
                    adapter_name(stem, which),
                    parameters[name],
                    *([] if axis is None else [(axis, cut.rank(), cut.size())]),
                    replica_id=(0, copy, replicas.rank()),
                )
                if axis == 0 and matrix.is_gated:  # the gate rows of all ranks, then the up rows
                    tensor = apply_swiglu_sharded_factory(tensor, ())
                state[name.partition(".")[2]] = tensor
        return state

    def are_zero(self, tensors: Mapping[str, Tensor]) -> bool:
        """Collective over the training ranks: returns whether adapters, named as in `layout`, have no effect."""
        own = torch.tensor(int(any(bool(tensors[matrix.b_name].any()) for matrix in self.matrices)))
        dist.all_reduce(own)
        return not own

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the body with the model's own weights only."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def sum_partial_gradients(self) -> None:
        """Collective over the ranks that share an expert, after a backward: sums gradients of complete adapters."""
        parameters: list[Any] = [each for each in self.named_parameters().values() if getattr(each, PARTIAL, False)]
        gradients: list[Tensor] = [parameter.main_grad for parameter in parameters]
        group = parallel_state.get_expert_tensor_parallel_group()
        if gradients and group.size() > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(
                gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))

    def _register(self, module: nn.Module, matrix: TrainedMatrix, dtype: str) -> None:
        weight = module.get_parameter(matrix.weight.rpartition(".")[2])
        by_columns, is_expert = matrix.is_cut_by_columns, matrix.is_expert
        for name, stored, is_cut in (
            (matrix.a_name, matrix.lora_a, by_columns),
            (matrix.b_name, matrix.lora_b, not by_columns),
        ):
            values = torch.full(stored.shape, torch.nan, dtype=DTYPES[dtype], device=weight.device)
            parameter: Any = nn.Parameter(values)
            parameter.allreduce = getattr(weight, "allreduce", True)  # False: reduced over the expert's replicas
            parameter.sequence_parallel = not is_expert and not is_cut and _scatters(module)
            if is_cut or is_expert:
                parameter.tensor_model_parallel = True
            if is_expert and not is_cut:
                group = parallel_state.get_expert_tensor_parallel_group()
                setattr(parameter, PARTIAL, group.size() > 1)
                parameter.shared = group.rank() > 0  # counted once in the gradient's norm
            module.register_parameter(name.rpartition(".")[2], parameter)

    def _add_products(self, matrices: list[TrainedMatrix], module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: returns the module's (output, bias) with the adapters' products added to the output."""
        if not self.enabled:
            return None
        y, bias = output
        x = _input_of(module, args[0])
        if len(matrices) == 1 and not _is_grouped(matrices[0]):
            return self._added(matrices[0], module, x, y), bias
        counts = args[1].tolist() if isinstance(args[1], Tensor) else list(args[1])
        experts = zip(matrices, torch.split(x, counts), torch.split(y, counts), strict=True)
        return torch.cat([self._added(matrix, module, rows, out) for matrix, rows, out in experts]), bias

    def _added(self, matrix: TrainedMatrix, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Returns y [..., O] plus the adapters' product with x [..., I]; collective over tensor-parallel."""
        lora_a = module.get_parameter(matrix.a_name.rpartition(".")[2])
        lora_b = module.get_parameter(matrix.b_name.rpartition(".")[2])
        h = torch.nn.functional.linear(x.to(lora_a.dtype), lora_a)
        if not _leaves_partial_sums(module, matrix):
            h = _exchange(h, module, matrix)
        added: Tensor = _AddProducts.apply(y, h, lora_b, matrix.segments(), self.scale)  # type: ignore[no-untyped-call]
        return added


class _AddProducts(torch.autograd.Function):
    """y [..., O] plus scale * h lora_B^T, where each run of rows of lora_B [O, r] takes its projection's part of h.

    h is [..., M * r]; runs are (projection, first row, row after the last), see `AdaptedMatrix.segments`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, h: Tensor, lora_b: Tensor, runs: list[tuple[int, int, int]], scale: float
    ) -> Tensor:
        ctx.save_for_backward(h, lora_b)
        ctx.runs, ctx.scale = runs, scale
        y_nO, h_n, wide_b = y.reshape(-1, y.size(-1)), h.reshape(-1, h.size(-1)).to(y.dtype), lora_b.to(y.dtype)
        rank, end, whole = lora_b.size(1), 0, y.new_empty(y.shape)
        out = whole.view_as(y_nO)
        for index, start, stop in [*runs, (-1, y_nO.size(1), y_nO.size(1))]:
            out[:, end:start] = y_nO[:, end:start]  # rows without adapters
            if index >= 0:
                part = h_n[:, index * rank : (index + 1) * rank]
                torch.addmm(y_nO[:, start:stop], part, wide_b[start:stop].T, alpha=scale, out=out[:, start:stop])
            end = stop
        return whole  # no view: Megatron adds an expert's bias to it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, lora_b = ctx.saved_tensors
        grad_nO, h_n = grads[0].reshape(-1, grads[0].size(-1)).to(h.dtype), h.reshape(-1, h.size(-1))
        rank = lora_b.size(1)
        grad_h, grad_b = torch.zeros_like(h_n), torch.zeros_like(lora_b)
        for index, start, stop in ctx.runs:
            part, own = slice(index * rank, (index + 1) * rank), grad_nO[:, start:stop]
            grad_h[:, part].addmm_(own, lora_b[start:stop], alpha=ctx.scale)
            grad_b[start:stop].addmm_(own.T, h_n[:, part], alpha=ctx.scale)
        return grads[0], grad_h.view(h.shape), grad_b, None, None


def _exchange(h: Tensor, module: nn.Module, matrix: TrainedMatrix) -> Tensor:
    """Collective over tensor-parallel: returns lora_A x as lora_B takes it on this rank, see the head of this file."""
    step: Callable[[Tensor], Tensor]
    if matrix.is_cut_by_columns:
        step = (
            reduce_scatter_to_sequence_parallel_region
            if _scatters(module)
            else reduce_from_tensor_model_parallel_region
        )
        return step(h)
    if _scatters(module):
        gathered: Tensor = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(h)
    return copied


def _scatters(module: nn.Module) -> bool:
    """Returns whether tensor-parallel ranks have different tokens outside this dense layer."""
    return (
        bool(getattr(module, "sequence_parallel", False)) and parallel_state.get_tensor_model_parallel_world_size() > 1
    )


def _leaves_partial_sums(module: nn.Module, matrix: TrainedMatrix) -> bool:
    return matrix.is_expert or bool(getattr(module, "explicit_expert_comm", False))


def _is_grouped(matrix: TrainedMatrix) -> bool:
    """Returns whether the module has the matrices of several experts (TransformerEngine's grouped linear)."""
    return not matrix.weight.endswith(WEIGHT)


def _input_of(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the input of the module's product; TransformerEngine's fused layer has a norm before it."""
    weight: Tensor | None = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    eps: float = module.eps  # type: ignore[assignment]
    gamma = weight + 1 if getattr(module, "zero_centered_gamma", False) else weight
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * gamma.float()).to(x.dtype)
