"""A mixture of experts in Megatron's terms: its part of the transformer config, and of the layer spec.

Owns the translation of `MoeSpec` and the `moe_*` fields of `ActorConfig`. How tokens are routed is in `router.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from mrl.config.config import ActorConfig, ParallelConfig
from mrl.megatron.router import LoadBalance, RoutedLayer, Router
from mrl.models.base import ArchSpec, MoeSpec


def moe_config(arch: ArchSpec, parallel: ParallelConfig, actor: ActorConfig, *, te: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`.

    Args:
        arch: The model, dense or not.
        parallel: Sizes of the expert groups.
        actor: Dispatcher and dtype of the router. Losses are not Megatron's, see `router.py`.
        te: The experts of a rank are TransformerEngine's grouped module; otherwise one module each.
    """
    if arch.moe is None:
        return {"moe_token_dispatcher_type": "alltoall"}  # no other allows microbatches of different lengths
    shared = arch.moe.shared_intermediate_size
    return {
        "num_moe_experts": arch.moe.num_experts,
        "moe_router_topk": arch.moe.top_k,
        "moe_ffn_hidden_size": arch.moe.intermediate_size,
        # a softmax over the chosen logits is the same as one over all, scaled to a sum of 1; over one: see `Router`
        "moe_router_pre_softmax": not arch.moe.norm_topk_prob or arch.moe.top_k == 1,
        "moe_router_dtype": actor.moe_router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": actor.moe_token_dispatcher_type,
        "moe_grouped_gemm": te,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": shared > 0,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def load_balance(arch: ArchSpec, actor: ActorConfig) -> LoadBalance | None:
    """What the routers of this rank report to; None for a dense model."""
    if arch.moe is None:
        return None
    return LoadBalance(
        num_layers=arch.num_layers,
        num_experts=arch.moe.num_experts,
        top_k=arch.moe.top_k,
        aux_coeff=actor.moe_aux_loss_coeff if actor.moe_router_load_balancing_type == "aux_loss" else 0.0,
        z_coeff=actor.moe_z_loss_coeff,
    )


def with_router(layer: ModuleSpec, moe: MoeSpec | None, balance: LoadBalance | None) -> ModuleSpec:
    """The layer spec with mrl's router in it; a dense one as it is."""
    if moe is not None and balance is not None:
        layer.module = RoutedLayer
        layer.submodules.mlp.submodules.router = functools.partial(
            Router, balance=balance, scale_to_one=moe.norm_topk_prob and moe.top_k == 1
        )
    return layer
