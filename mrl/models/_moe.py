"""The mixture-of-experts layer that takes the place of the dense MLP: its rows, and config.json <-> MoeSpec.

Owns what mixtral, qwen2_moe and qwen3_moe have in common; how a family spells its tensors and keys stands in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._decoder import DENSE_MLP
from mrl.models._keys import OF_TRANSFORMERS
from mrl.models._values import flag, whole
from mrl.models.base import Kind, MoeSpec, ParamSpec, Place

ROUTER_WITHOUT_EFFECT: Mapping[str, str] = {
    "output_router_logits": OF_TRANSFORMERS,
    "router_aux_loss_coef": "actor.moe_aux_loss_coeff says how mrl balances the experts",
}
"""Keys of a mixture of experts -> why log-probabilities do not depend on them."""

QWEN_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
"""The keys of config.json that qwen's families share and read."""

QWEN_MLP = "model.layers.{layer}.mlp."
"""What the Hugging Face names of qwen's experts begin with."""


def moe_layer(
    prefix: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[ParamSpec, ...]:
    """The norm before the experts, the router ("gate" in Hugging Face names) and the experts.

    With TransformerEngine the norm stays a module of its own, unlike before a dense MLP.

    Args:
        prefix: Of the Hugging Face names, "model.layers.{layer}....".
        gate: Name of an expert's projection into the activated branch.
        up: Of the projection into the other branch.
        down: Of the projection back.
    """
    experts = "decoder.layers.{layer}.mlp.experts"
    return (
        replace(DENSE_MLP[0], megatron_te=None),
        ParamSpec(
            hf=(f"{prefix}gate.weight",),
            shapes=("experts hidden",),
            megatron="decoder.layers.{layer}.mlp.router.weight",
            native="layers.{layer}.router",
            trtllm=("transformer.layers.{layer}.mlp.router.weight",),
            trtllm_dtype="float32",
            kind=Kind.REPLICATED,
            place=Place.LAYER,
        ),
        ParamSpec(
            hf=(f"{prefix}experts.{{expert}}.{gate}.weight", f"{prefix}experts.{{expert}}.{up}.weight"),
            shapes=("expert_ffn hidden", "expert_ffn hidden"),
            megatron=f"{experts}.local_experts.{{expert}}.linear_fc1.weight",
            megatron_te=f"{experts}.linear_fc1.weight{{expert}}",
            native="layers.{layer}.experts_gate_up",
            trtllm=("transformer.layers.{layer}.mlp.fc.weight",),
            kind=Kind.EXPERT_GATE_UP,
            place=Place.LAYER,
        ),
        ParamSpec(
            hf=(f"{prefix}experts.{{expert}}.{down}.weight",),
            shapes=("hidden expert_ffn",),
            megatron=f"{experts}.local_experts.{{expert}}.linear_fc2.weight",
            megatron_te=f"{experts}.linear_fc2.weight{{expert}}",
            native="layers.{layer}.experts_down",
            trtllm=("transformer.layers.{layer}.mlp.proj.weight",),
            kind=Kind.EXPERT_DOWN,
            place=Place.LAYER,
        ),
    )


def shared_expert(prefix: str) -> tuple[ParamSpec, ...]:
    """The expert that every token goes to, and its gate."""
    shared = "decoder.layers.{layer}.mlp.shared_experts"
    return (
        ParamSpec(
            hf=(f"{prefix}shared_expert.gate_proj.weight", f"{prefix}shared_expert.up_proj.weight"),
            shapes=("shared_ffn hidden", "shared_ffn hidden"),
            megatron=f"{shared}.linear_fc1.weight",
            native="layers.{layer}.shared_gate_up",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert.fc.weight",),
            kind=Kind.GATE_UP,
            place=Place.LAYER,
        ),
        ParamSpec(
            hf=(f"{prefix}shared_expert.down_proj.weight",),
            shapes=("hidden shared_ffn",),
            megatron=f"{shared}.linear_fc2.weight",
            native="layers.{layer}.shared_down",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert.proj.weight",),
            kind=Kind.ROW,
            place=Place.LAYER,
        ),
        ParamSpec(
            hf=(f"{prefix}shared_expert_gate.weight",),
            shapes=("one hidden",),
            megatron=f"{shared}.gate_weight",
            native="layers.{layer}.shared_gate",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert_gate.weight",),
            kind=Kind.REPLICATED,
            place=Place.LAYER,
        ),
    )


def moe_spec(
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    key_of_number: Callable[[Mapping[str, Any]], str],
    intermediate_size: str = "moe_intermediate_size",
    shared_intermediate_size: str | None = None,
) -> MoeSpec:
    """config.json -> MoeSpec.

    Args:
        config: The parsed file.
        defaults: What transformers assumes for keys that the file may leave out; without `norm_topk_prob` it is true.
        key_of_number: config.json -> its key for the number of experts.
        intermediate_size: The family's key for the width of an expert.
        shared_intermediate_size: Its key for the width of the shared expert; None: there is none.

    Raises:
        UserError: A key is missing or wrong, or some layers have a dense MLP.
    """
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UserError(
            f"config.json: decoder_sparse_step={shown(config.get('decoder_sparse_step', 1))}, mlp_only_layers="
            f"{shown(config.get('mlp_only_layers'))}: some layers have a dense MLP. mrl builds "
            "experts in all layers or none."
        )
    num_experts = key_of_number(config)
    experts, top_k = whole(config, num_experts, defaults), whole(config, "num_experts_per_tok", defaults)
    if top_k > experts:
        raise UserError(f"config.json: num_experts_per_tok ({top_k}) is above {num_experts} ({experts}).")
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=whole(config, intermediate_size, defaults),
        norm_topk_prob="norm_topk_prob" not in defaults or flag(config, "norm_topk_prob", defaults),
        shared_intermediate_size=whole(config, shared_intermediate_size, defaults) if shared_intermediate_size else 0,
    )


def experts_key(config: Mapping[str, Any]) -> str:
    """The key with the number of experts: transformers has two names for it, whatever the family's own one is.

    Raises:
        UserError: Both are there and differ.
    """
    both = [key for key in ("num_experts", "num_local_experts") if key in config]
    if len(both) == 2 and config[both[0]] != config[both[1]]:
        raise UserError(
            f"config.json: num_experts is {shown(config[both[0]])} and num_local_experts {shown(config[both[1]])}; "
            "they are one number. Keep the one that is meant."
        )
    return both[0] if both else "num_experts"


def qwen_keys(moe: MoeSpec) -> dict[str, Any]:
    """MoeSpec -> the keys of config.json that qwen's families share; the shared expert's width is not among them."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
