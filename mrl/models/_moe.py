"""Mixture-of-experts layer that replaces the dense MLP: its parameter table and config.json <-> MoeSpec.

Shared by mixtral, qwen2_moe and qwen3_moe; the spelling of names and keys is in the file of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._decoder import DENSE_MLP, MAX_LAYERS
from mrl.models._keys import OF_TRANSFORMERS
from mrl.models._values import flag, positive_float, positive_int, value_of
from mrl.models.base import ArchSpec, LayerKind, MoeSpec, ParamSpec, PipelineStage, ShardKind, moe_of

ROUTER_WITHOUT_EFFECT: Mapping[str, str] = {
    "output_router_logits": OF_TRANSFORMERS,
    "router_aux_loss_coef": "mrl uses actor.moe_aux_loss_coeff",
}
"""Keys of MoE models -> why log-probabilities do not depend on them."""

QWEN_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
"""Keys of config.json that the Qwen MoE families share."""

QWEN_MLP = "model.layers.{layer}.mlp."
"""Prefix of the Hugging Face names of Qwen's experts."""


def moe_layer(
    prefix: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate",
    vllm_router: str | None = None,
) -> tuple[ParamSpec, ...]:
    """Returns the parameters of an MoE layer: the norm, the router and the experts.

    Under TransformerEngine this norm is a separate module; in a dense layer it is fused into the MLP.

    Args:
        prefix: Start of the Hugging Face names, "model.layers.{layer}....".
        gate: Hugging Face name of an expert's gate projection (the activated branch).
        up: Hugging Face name of an expert's up projection.
        down: Hugging Face name of an expert's down projection.
        router: Hugging Face name of the router.
        vllm_router: Dtype of the router in vLLM; None: the model's.
    """
    experts = "decoder.layers.{layer}.mlp.experts"
    return (
        replace(DENSE_MLP[0], megatron_te=None, layers=LayerKind.MOE),
        ParamSpec(
            hf=(f"{prefix}{router}.weight",),
            shapes=("experts hidden",),
            megatron="decoder.layers.{layer}.mlp.router.weight",
            native="layers.{layer}.router",
            trtllm=("transformer.layers.{layer}.mlp.router.weight",),
            trtllm_dtype="float32",
            vllm_dtype=vllm_router,
            kind=ShardKind.REPLICATED,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
        ),
        ParamSpec(
            hf=(f"{prefix}experts.{{expert}}.{gate}.weight", f"{prefix}experts.{{expert}}.{up}.weight"),
            shapes=("expert_ffn hidden", "expert_ffn hidden"),
            megatron=f"{experts}.local_experts.{{expert}}.linear_fc1.weight",
            megatron_te=f"{experts}.linear_fc1.weight{{expert}}",
            native="layers.{layer}.experts_gate_up",
            trtllm=("transformer.layers.{layer}.mlp.fc.weight",),
            kind=ShardKind.EXPERT_GATE_UP,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
        ),
        ParamSpec(
            hf=(f"{prefix}experts.{{expert}}.{down}.weight",),
            shapes=("hidden expert_ffn",),
            megatron=f"{experts}.local_experts.{{expert}}.linear_fc2.weight",
            megatron_te=f"{experts}.linear_fc2.weight{{expert}}",
            native="layers.{layer}.experts_down",
            trtllm=("transformer.layers.{layer}.mlp.proj.weight",),
            kind=ShardKind.EXPERT_DOWN,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
        ),
    )


def moe_biases(layer: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    """Returns the biases of an MoE layer's router and experts, from the rows of `moe_layer`."""
    _, router, gate_up, down = layer
    return (
        _bias_of(router, ("experts",), ShardKind.REPLICATED, "layers.{layer}.router_logit_bias"),
        _bias_of(gate_up, ("expert_ffn", "expert_ffn"), ShardKind.EXPERT_GATE_UP, f"{gate_up.native}_bias"),
        _bias_of(down, ("hidden",), ShardKind.EXPERT_REPLICATED, f"{down.native}_bias"),
    )


def _bias_of(spec: ParamSpec, shapes: tuple[str, ...], kind: ShardKind, native: str) -> ParamSpec:
    return replace(
        spec,
        hf=tuple(name.replace(".weight", ".bias") for name in spec.hf),
        shapes=shapes,
        megatron=spec.megatron.replace(".weight", ".bias"),
        megatron_te=None if spec.megatron_te is None else spec.megatron_te.replace(".weight", ".bias"),
        native=native,
        trtllm=(),
        trtllm_dtype=None,
        kind=kind,
        when=lambda arch: arch.moe is not None and arch.moe.biases,
    )


def selection_bias(name: str) -> ParamSpec:
    """Returns the bias that is added to the experts' scores where they are selected, of a Hugging Face name."""
    return ParamSpec(
        hf=(name,),
        shapes=("experts",),
        megatron="decoder.layers.{layer}.mlp.router.expert_bias",
        native="layers.{layer}.router_bias",
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
        layers=LayerKind.MOE,
        dtype="float32",
        is_buffer=True,
        when=lambda arch: arch.moe is not None and arch.moe.score_bias,
    )


def shared_expert(prefix: str, name: str = "shared_expert") -> tuple[ParamSpec, ...]:
    """Returns the parameters of the shared expert and its sigmoid gate.

    Args:
        prefix: Start of the Hugging Face names, "model.layers.{layer}....".
        name: Name of its module in Hugging Face names.
    """
    shared = "decoder.layers.{layer}.mlp.shared_experts"
    return (
        ParamSpec(
            hf=(f"{prefix}{name}.gate_proj.weight", f"{prefix}{name}.up_proj.weight"),
            shapes=("shared_ffn hidden", "shared_ffn hidden"),
            megatron=f"{shared}.linear_fc1.weight",
            native="layers.{layer}.shared_gate_up",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert.fc.weight",),
            kind=ShardKind.GATE_UP,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
            when=_has_shared_expert,
        ),
        ParamSpec(
            hf=(f"{prefix}{name}.down_proj.weight",),
            shapes=("hidden shared_ffn",),
            megatron=f"{shared}.linear_fc2.weight",
            native="layers.{layer}.shared_down",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert.proj.weight",),
            kind=ShardKind.ROW,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
            when=_has_shared_expert,
        ),
        ParamSpec(
            hf=(f"{prefix}shared_expert_gate.weight",),
            shapes=("one hidden",),
            megatron=f"{shared}.gate_weight",
            native="layers.{layer}.shared_gate",
            trtllm=("transformer.layers.{layer}.mlp.shared_expert_gate.weight",),
            kind=ShardKind.REPLICATED,
            place=PipelineStage.LAYER,
            layers=LayerKind.MOE,
            when=lambda arch: _has_shared_expert(arch) and moe_of(arch).shared_gate,
        ),
    )


def _has_shared_expert(arch: ArchSpec) -> bool:
    return arch.moe is not None and arch.moe.shared_intermediate_size > 0


def moe_spec(
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    num_experts_key: Callable[[Mapping[str, Any]], str],
    intermediate_size: str = "moe_intermediate_size",
    shared_intermediate_size: str | None = None,
    dense_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda config, layers: (),
) -> MoeSpec:
    """Reads the MoeSpec from a config.json.

    Args:
        config: Parsed config.json.
        defaults: Values that transformers assumes for missing keys; `norm_topk_prob` is true if it is not among them.
        num_experts_key: Function from config.json to its key for the number of experts.
        intermediate_size: Key for the FFN width of an expert.
        shared_intermediate_size: Key for the FFN width of the shared expert; None: the family has none.
        dense_layers: Function (config.json, number of layers) -> `MoeSpec.dense_layers`.

    Raises:
        UserError: A key is missing or wrong, or no layer has experts.
    """
    layers = positive_int(config, "num_hidden_layers", defaults, most=MAX_LAYERS)
    dense = dense_layers(config, layers)
    if len(dense) == layers:
        raise UserError(f"config.json: none of the {layers} layers has experts (mlp_only_layers, decoder_sparse_step).")
    num_experts = num_experts_key(config)
    experts, top_k = positive_int(config, num_experts, defaults), positive_int(config, "num_experts_per_tok", defaults)
    if top_k > experts:
        raise UserError(f"config.json: num_experts_per_tok ({top_k}) is above {num_experts} ({experts}).")
    shared_key = shared_intermediate_size
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=positive_int(config, intermediate_size, defaults),
        norm_topk_prob="norm_topk_prob" not in defaults or flag(config, "norm_topk_prob", defaults),
        shared_intermediate_size=0 if shared_key is None else positive_int(config, shared_key, defaults),
        dense_layers=dense,
    )


def qwen_dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers of a Qwen MoE model with a dense MLP.

    Raises:
        UserError: `decoder_sparse_step` or `mlp_only_layers` is wrong.
    """
    step = positive_int(config, "decoder_sparse_step", {"decoder_sparse_step": 1})
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise UserError(f"config.json: mlp_only_layers is {shown(named)}; expected a list of layer indices.")
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def experts_key(config: Mapping[str, Any]) -> str:
    """Returns the key for the number of experts; transformers writes one of two names in any family.

    Raises:
        UserError: Both keys are present and differ.
    """
    return _same_number(config, "num_experts", "num_local_experts")


def _same_number(config: Mapping[str, Any], first: str, second: str) -> str:
    """Returns which of two keys for the number of experts config.json has; the first if it has none."""
    both = [key for key in (first, second) if key in config]
    if len(both) == 2 and config[first] != config[second]:
        raise UserError(
            f"config.json: {first} is {shown(config[first])} and {second} {shown(config[second])}; both are the number "
            "of experts. Remove the wrong one."
        )
    return both[0] if both else first


def qwen_keys(moe: MoeSpec) -> dict[str, Any]:
    """Returns the keys of config.json that the Qwen MoE families share, without the shared expert's width."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }


def sigmoid_moe_spec(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> MoeSpec:
    """Reads the MoeSpec of a model whose experts are chosen by sigmoid scores with a bias (`noaux_tc`, DeepSeek-V3's).

    Raises:
        UserError: A key is missing or wrong, or no layer has experts.
    """
    dense = _first_layers(config, defaults)
    experts_name = _same_number(config, "n_routed_experts", "num_local_experts")
    experts, top_k = positive_int(config, experts_name, defaults), positive_int(config, "num_experts_per_tok", defaults)
    groups, top_groups = (positive_int(config, key, defaults) for key in ("n_group", "topk_group"))
    if (
        experts % groups
        or top_groups > groups
        or top_k > experts // groups * top_groups
        or (groups > 1 and experts // groups < 2)
    ):
        raise UserError(
            f"config.json: {experts} experts ({experts_name}) in {groups} groups (n_group), of which {top_groups} "
            f"(topk_group) have {top_k} experts for a token (num_experts_per_tok): these sizes do not fit."
        )
    width = positive_int(config, "moe_intermediate_size", defaults)
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        norm_topk_prob=flag(config, "norm_topk_prob", defaults),
        shared_intermediate_size=width * _count(config, "n_shared_experts", defaults),
        shared_gate=False,
        score_function="sigmoid",
        score_bias=True,
        num_groups=groups,
        top_groups=top_groups,
        scaling_factor=positive_float(config, "routed_scaling_factor", defaults),
        dense_layers=dense,
    )


def sigmoid_keys(moe: MoeSpec) -> dict[str, Any]:
    """Returns the keys of config.json that `sigmoid_moe_spec` reads."""
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scaling_factor,
        "first_k_dense_replace": len(moe.dense_layers),
    }


def softmax_moe_spec(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> MoeSpec:
    """Reads the MoeSpec of a model with shared experts whose other experts are chosen by a softmax.

    The weights of the chosen experts are not scaled to a sum of 1 (DeepSeek-V2's `greedy`).

    Raises:
        UserError: A key is missing or wrong, or no layer has experts.
    """
    spec = moe_spec(
        config,
        defaults={**defaults, "norm_topk_prob": False},
        num_experts_key=lambda config: _same_number(config, "n_routed_experts", "num_experts"),
        dense_layers=lambda config, layers: _first_layers(config, defaults),
    )
    return replace(
        spec,
        shared_intermediate_size=spec.intermediate_size * _count(config, "n_shared_experts", defaults),
        shared_gate=False,
        scaling_factor=positive_float(config, "routed_scaling_factor", defaults),
    )


def softmax_keys(moe: MoeSpec) -> dict[str, Any]:
    """Returns the keys of config.json that `softmax_moe_spec` reads."""
    keys = sigmoid_keys(moe)
    del keys["n_group"], keys["topk_group"]
    return keys


def _first_layers(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the layers with a dense MLP before those with experts."""
    layers = positive_int(config, "num_hidden_layers", defaults, most=MAX_LAYERS)
    first = _count(config, "first_k_dense_replace", defaults)
    if first >= layers:
        raise UserError(f"config.json: first_k_dense_replace is {first}; none of the {layers} layers has experts.")
    return tuple(range(first))


def _count(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> int:
    """Returns an integer of config.json of at least 0."""
    return 0 if value_of(config, key, defaults) == 0 else positive_int(config, key, defaults)
