"""Multi-head latent attention: Megatron's layer, with rotary angles by row and gradients that are summed over ranks.

Megatron's own layer computes the positions of packed sequences in each layer. With tensor parallelism and no sequence
parallelism it has on each rank only that rank's heads' part of the gradient of the rotated key, which all heads share.

Shapes: n rows of a rank, N heads of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.megatron.attention import PackedSequences
from mrl.models.base import ArchSpec, MlaSpec
from mrl.models.kernels.rope_tables import rotate

_FUSED_NORMS = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Norms of local layers that a checkpoint has under the names of TransformerEngine's fused linears."""


class ReplicatedLinear(torch.nn.Module):
    """Linear layer whose weight every tensor-parallel rank has; the rows are those of the rank."""

    def __init__(self, config: Any, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Returns (the product, None for the bias)."""
        return F.linear(rows, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's latent attention on packed sequences; arguments as Megatron's and the model's sizes."""

    linear_q_down_proj: Any
    linear_kv_down_proj: Any

    def __init__(self, config: Any, *args: Any, mla: MlaSpec, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._mla = mla
        # a norm is a module of its own, or part of TransformerEngine's linear layer
        for name in ("q_layernorm", "linear_q_up_proj", "kv_layernorm", "linear_kv_up_proj"):
            if hasattr(getattr(self, name, None), "eps"):
                getattr(self, name).eps = mla.norm_eps
        if isinstance(self.linear_kv_down_proj, ColumnParallelLinear):
            self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, mla.cache_dim)
            if mla.q_lora_rank is not None:
                self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, mla.q_lora_rank)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Returns the modules that the spec names; 0.19 would add a norm to queries without a latent vector."""
        linears = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        norms = {name: getattr(submodules, name) or IdentityOp for name in ("q_layernorm", "kv_layernorm")}
        return norms | {name: getattr(submodules, name) for name in linears}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Collective over tensor-parallel: computes rotated queries and keys, values and the two latent vectors.

        Args:
            hidden_states: [n, 1, H], under sequence parallelism this rank's part.
            key_value_states: Unused.
            position_ids: Unused.
            packed_seq_params: Plan with the rotary angles.
            inference_context: Unused.
            **unused: Further arguments of Megatron's.

        Returns:
            Queries and keys [n, 1, N, D] and values [n, 1, N, v], in a "thd" plan without the second dimension; the
            latent vectors of queries (the hidden states if the model has none), and of keys and values.
        """
        if packed_seq_params is None:
            raise ValueError("attention takes packed sequences")
        mla = self._mla
        if mla.q_lora_rank is None:
            latent_q = hidden_states
            query, _ = self.linear_q_proj(latent_q)
        else:
            latent_q = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
            query, _ = self.linear_q_up_proj(latent_q)
        latent, shared = self.linear_kv_down_proj(hidden_states)[0].split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        latent = self.kv_layernorm(latent)
        up, _ = self.linear_kv_up_proj(latent)
        # all heads use the rotated key, and each rank has some of them
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared.contiguous(), tensor_parallel_output_grad=True)
        else:
            shared = copy_to_tensor_model_parallel_region(shared)
        heads = (*query.shape[:2], self.num_attention_heads_per_partition)
        fixed, turned = query.view(*heads, -1).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        key, value = up.view(*heads, -1).split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        cos, sin = packed_seq_params.tables_of(None)
        turned, shared = (_in_halves(part) for part in (turned, shared[:, :, None]))
        query = torch.cat([fixed, rotate(turned, cos, sin)], -1)
        key = torch.cat([key, rotate(shared, cos, sin).expand(*heads, -1)], -1)
        if packed_seq_params.qkv_format == "thd":
            query, key, value = (part.squeeze(1) for part in (query, key, value))
        return query, key, value, latent_q, latent


def _in_halves(part: Tensor) -> Tensor:
    """Returns the dimensions in the order in which the pairs of a rotation are in two halves."""
    return torch.cat([part[..., 0::2], part[..., 1::2]], -1)


def with_latent_attention(layer: ModuleSpec, mla: MlaSpec, *, norm: type | None = None) -> ModuleSpec:
    """Returns Megatron's spec of a layer with latent attention, with this file's module in it; changed in place.

    Args:
        layer: Megatron's spec.
        mla: Sizes of the model's latent attention.
        norm: Class of the norms of the latent vectors; None: that of the spec.
    """
    attention = layer.submodules.self_attention
    if norm is not None:
        layer.submodules.sharded_state_dict_keys_map = _FUSED_NORMS
        parts = attention.submodules
        parts.q_layernorm, parts.kv_layernorm = IdentityOp if mla.q_lora_rank is None else norm, norm
    attention.module = LatentAttention
    attention.params = {**attention.params, "mla": mla}
    return layer


def latent_fields(arch: ArchSpec) -> dict[str, Any]:
    """Returns the fields of Megatron's config of a model with latent attention; {} for other models."""
    mla, scaling = arch.mla, arch.rope_scaling
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": arch.rope_theta,
        # Megatron computes the factor of the scores from these
        "rotary_scaling_factor": 1.0 if scaling is None else scaling.factor,
        "mscale_all_dim": 0.0 if scaling is None else scaling.mscale_all_dim or 0.0,
    }
