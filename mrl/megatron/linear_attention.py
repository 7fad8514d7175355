"""Gated delta net for Megatron's local layer spec, over packed sequences with shared prefixes.

Heads are split over tensor-parallel ranks, and the channels of the convolution with them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mrl.config.config import ParallelConfig
from mrl.errors import UserError
from mrl.megatron.attention import PackedSequences
from mrl.megatron.linear_attention_plan import LinearAttentionPlan
from mrl.models.base import ArchSpec, LinearAttentionSpec
from mrl.models.kernels.delta_rule import Scan, convolve, delta_rule, gated_norm, scan_inputs, split_projection


class _Weight(torch.nn.Module):
    """Parameter `weight` of a submodule, uninitialised."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))


class GatedDeltaNet(torch.nn.Module):
    """Gated delta net of one layer; Megatron builds it as the layer's self-attention.

    With selective recompute of attention, everything between the two projections is computed again in the backward.

    Args:
        config: Megatron's config.
        linear: Sizes of the heads.
        layer_number: Unused.
        pg_collection: Megatron's process groups; None: its global ones.
    """

    def __init__(
        self, config: Any, linear: LinearAttentionSpec, layer_number: int = 1, pg_collection: Any = None, **unused: Any
    ) -> None:
        super().__init__()
        ranks, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._linear, self._eps = linear, config.layernorm_epsilon
        selective = config.recompute_granularity == "selective"
        self._recomputes = selective and "core_attn" in (config.recompute_modules or ())
        self._group = None if pg_collection is None else pg_collection.tp
        options = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self._group,
        }
        rows = linear.channels + linear.value_size + 2 * linear.num_value_heads
        self.in_proj = ColumnParallelLinear(config.hidden_size, rows, gather_output=False, **options)
        self.conv1d = _Weight(linear.channels // ranks, 1, linear.conv_kernel, dtype=dtype)
        self.dt_bias, self.A_log = (
            torch.nn.Parameter(torch.empty(linear.num_value_heads // ranks, dtype=dtype)) for _ in range(2)
        )
        self.norm = _Weight(linear.value_head_dim, dtype=dtype)
        self.out_proj = RowParallelLinear(linear.value_size, config.hidden_size, input_is_parallel=True, **options)
        for own in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(own, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Collective over tensor-parallel: returns (outputs [n, 1, H], None for the bias).

        Args:
            hidden_states: [n, 1, H]; with sequence parallelism this rank's rows.
            attention_mask: Unsupported, must be None.
            packed_seq_params: Packed sequences with `linear`.
            unused: Megatron's further arguments, such as rotary angles.
        """
        if attention_mask is not None or packed_seq_params is None or packed_seq_params.linear is None:
            raise ValueError("linear attention takes packed sequences with a plan, and no mask")
        rows, _ = self.in_proj(hidden_states)
        if self._recomputes and torch.is_grad_enabled():
            normed = checkpoint(
                self._mix, rows.squeeze(1), packed_seq_params.linear, use_reentrant=False, preserve_rng_state=False
            )
        else:
            normed = self._mix(rows.squeeze(1), packed_seq_params.linear)
        output, _ = self.out_proj(normed[:, None])
        return output, None

    def _mix(self, rows: Tensor, plan: LinearAttentionPlan) -> Tensor:
        """Returns the inputs of the output projection from rows of the input projection."""
        projected = split_projection(rows, self._linear)
        taps = plan.taps.gather(_with_zeros(projected.mixed)).view(
            -1, self._linear.conv_kernel, projected.mixed.size(1)
        )
        scan = scan_inputs(convolve(taps, self.conv1d.weight), projected, self.A_log, self.dt_bias, self._linear)
        # each rank normalises its own heads, so the gradient of the weight is summed over the ranks
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self._group)
        return gated_norm(_scanned(scan, plan), projected.gate, weight, self._eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the parameters for a distributed checkpoint; those of heads are split over tensor-parallel ranks."""
        products = ("in_proj", "out_proj")
        own = {name: value for name, value in self.named_parameters() if name.partition(".")[0] not in products}
        split = {name: 0 for name, value in own.items() if getattr(value, "tensor_model_parallel", False)}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, split, sharded_offsets)
        for name in products:
            sharded |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded


def check_linear_attention(arch: ArchSpec, parallel: ParallelConfig, *, exact: bool) -> None:
    """Refuses a model with linear attention or output gates where the actor cannot compute it.

    Args:
        arch: Architecture of the model.
        parallel: Parallel sizes.
        exact: True if the layers are batch-invariant.

    Raises:
        UserError: Context parallelism, or `rollout.true_on_policy`.
    """
    if arch.linear_attention is None and not arch.output_gate:
        return
    if parallel.context_parallel_size > 1:
        raise UserError(
            f"parallel.context_parallel_size={parallel.context_parallel_size}: the state of the linear attention of "
            f"this {arch.family} model passes through all tokens of a sequence. Set it to 1."
        )
    if exact:
        raise UserError(
            f"rollout.true_on_policy=true: the batch-invariant kernels compute neither the linear attention nor the "
            f"output gates of this {arch.family} model. Remove it."
        )


def _with_zeros(rows: Tensor) -> Tensor:
    """Appends a row of zeros."""
    return F.pad(rows, (0, 0, 0, 1))


def _scanned(scan: Scan, plan: LinearAttentionPlan) -> Tensor:
    """Returns the outputs of the delta rule for all rows, [D, H, V]."""
    heads, key_dim, value_dim = scan.value.size(1), scan.key.size(2), scan.value.size(2)
    shapes = [x.shape[1:] for x in scan]
    widths = [shape.numel() for shape in shapes]
    rows = _with_zeros(torch.cat([x.flatten(1) for x in scan], 1))
    outputs, states = [], torch.empty(0)
    for level in plan.levels:
        last = []
        for group in level:
            parts = torch.split(group.rows.gather(rows).view(group.size, -1, rows.size(1)), widths, -1)
            own = Scan(*(part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)))
            state = None
            if group.states is not None:
                state = group.states.gather(states).view(-1, heads, key_dim, value_dim)
            output, state = delta_rule(own, state)
            outputs.append(output.flatten(0, 1).flatten(1))
            last.append(state.flatten(1))
        states = torch.cat(last)
    return plan.slots.gather(torch.cat(outputs)).view(-1, heads, value_dim)
