"""Megatron fields that mrl enables automatically with TransformerEngine: fusions and communication overlap.

All such defaults are here. The config overrides each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mrl.config.config import ActorConfig, MegatronConfig

FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
"""Fusions in every layer: rotary embedding, SwiGLU, and weight gradients that their GEMM adds to the gradient
buffer."""
EXPERT_FUSIONS = ("moe_permute_fusion",)
"""Fusions of MoE layers: one kernel sorts tokens by expert."""
INSTEAD = {"use_te_activation_func": "bias_activation_fusion"}
"""Field set in the config -> default that Megatron does not accept together with it."""


def transformer_defaults(
    given: Mapping[str, Any], *, te: bool, moe: bool, without: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the fields of `megatron.transformer` to enable, without those that the config sets.

    Args:
        given: `megatron.transformer` of the config.
        te: Whether TransformerEngine is in use.
        moe: Whether the model is an MoE.
        without: Fusions that the model cannot have (`transformer_engine.missing_fusions`).
    """
    names = (*FUSIONS, *(EXPERT_FUSIONS if moe else ())) if te else ()
    out = {default for name, default in INSTEAD.items() if given.get(name)}
    return {name: True for name in names if name not in given and name not in out and name not in without}


def overlaps_gradients(actor: ActorConfig, *, te: bool) -> bool:
    """Returns whether gradients are reduced during the backward pass."""
    return te if actor.overlap_grad_reduce is None else actor.overlap_grad_reduce


def equal_lengths(actor: ActorConfig, megatron: MegatronConfig) -> bool:
    """Returns whether microbatches must have one length on all expert-parallel ranks.

    HybridEP needs it too, unless it pads by itself (megatron-core 0.19).
    """
    fields = megatron.transformer
    hybridep = actor.moe_token_dispatcher_type == "flex" and fields.get("moe_flex_dispatcher_backend") == "hybridep"
    pads_itself = bool(fields.get("moe_hybridep_pad_uneven_dispatch_inputs"))
    return actor.moe_token_dispatcher_type == "allgather" or (hybridep and not pads_itself)


def ddp_defaults(actor: ActorConfig, megatron: MegatronConfig, *, te: bool) -> dict[str, Any]:
    """Returns the fields of `megatron.ddp` to enable, without those that the config sets: `overlap_param_gather`."""
    gathers = te and actor.use_distributed_optimizer and overlaps_gradients(actor, te=te)
    return {"overlap_param_gather": True} if gathers and "overlap_param_gather" not in megatron.ddp else {}
