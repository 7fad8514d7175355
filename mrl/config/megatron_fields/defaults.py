"""What mrl turns on by itself where TransformerEngine is in use: fusions, and communication behind computation.

The one place with such defaults. Whatever the config says of a field wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.config import ActorConfig, MegatronConfig

FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
"""Of every layer: the rotary embedding, SwiGLU, and weight gradients that are added to the buffer by their own GEMM."""
EXPERT_FUSIONS = ("moe_permute_fusion",)
"""Of a mixture of experts: tokens are sorted by expert in one kernel."""
INSTEAD = {"use_te_activation_func": "bias_activation_fusion"}
"""A given field -> the default that Megatron does not take with it."""


def transformer_defaults(given: Mapping[str, Any], *, te: bool, moe: bool) -> dict[str, Any]:
    """Fields of `megatron.transformer` that are on, without those that are given.

    Args:
        given: `megatron.transformer`.
        te: Whether TransformerEngine is in use.
        moe: Whether the model has experts.
    """
    names = (*FUSIONS, *(EXPERT_FUSIONS if moe else ())) if te else ()
    out = {default for name, default in INSTEAD.items() if given.get(name)}
    return {name: True for name in names if name not in given and name not in out}


def overlaps_gradients(actor: ActorConfig, *, te: bool) -> bool:
    """Whether gradients are reduced while the backward runs."""
    return te if actor.overlap_grad_reduce is None else actor.overlap_grad_reduce


def ddp_defaults(actor: ActorConfig, megatron: MegatronConfig, *, te: bool) -> dict[str, Any]:
    """Fields of `megatron.ddp` that are on, without those that are given: weights gathered while the forward runs."""
    gathers = te and actor.use_distributed_optimizer and overlaps_gradients(actor, te=te)
    return {"overlap_param_gather": True} if gathers and "overlap_param_gather" not in megatron.ddp else {}
