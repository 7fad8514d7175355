"""Gemma 3 (text): zero-centered norms before and after attention and MLP, GELU, a rotary base of the windowed layers.

Transformers 5 writes `rope_parameters` with an object for each kind of layer; older versions write `rope_theta` and
`rope_scaling` for the layers without a window and `rope_local_base_freq` for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._decoder import ATTENTION, DENSE_MLP, HEAD, HIDDEN_ACT, decoder_family
from mrl.models._keys import config_keys
from mrl.models._rope import RopeRules, read_rope, write_rope
from mrl.models._values import positive_int
from mrl.models._windows import BY_PATTERN, FULL, PATTERN, SLIDING
from mrl.models.base import ArchSpec, ParamSpec, PipelineStage, ShardKind

_LOCAL, _SCALE = "rope_local_base_freq", "query_pre_attn_scalar"
_ACTIVATION = HIDDEN_ACT["gelu_tanh"]
_CAPPED = "logits that are limited by tanh are not supported"

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    _LOCAL: 10_000.0,
    _SCALE: 256,
}


def _post_norm(after: str, megatron: str, native: str) -> ParamSpec:
    return ParamSpec(
        hf=(f"model.layers.{{layer}}.post_{after}_layernorm.weight",),
        shapes=("hidden",),
        megatron=f"decoder.layers.{{layer}}.{megatron}.norm.weight",
        native=f"layers.{{layer}}.{native}",
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
    )


def _by_kind(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns config.json with the rotary settings of the layers without a window, and those of the windowed ones."""
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or set(rope) - {FULL, SLIDING}:
        raise UserError(
            f"config.json: rope_parameters is {shown(rope)}; expected an object with '{FULL}' and '{SLIDING}', the "
            "rotary settings of each kind of layer."
        )
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and "rope_type" not in scaling and scaling:
        raise UserError(
            f"config.json: rope_scaling is {shown(scaling)}, which has no 'rope_type': versions of transformers would "
            "read different models. Add it."
        )
    local = {"rope_parameters": rope.get(SLIDING)}
    if _LOCAL in config:
        local["rope_theta"] = config[_LOCAL]
    return {**config, "rope_parameters": rope.get(FULL)}, local


def _local_theta(local: Mapping[str, Any], head_dim: int) -> float:
    defaults = {"rope_theta": _DEFAULTS[_LOCAL]}
    try:
        return read_rope(local, defaults, RopeRules(("default",)), head_dim=head_dim).rope_theta
    except UserError as error:
        raise UserError(f"{error} (Of the windowed layers: {_LOCAL} and rope_parameters.{SLIDING}.)") from error


def _arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    full, local = _by_kind(config)
    arch = _DECODER.arch_from_hf(full)
    scalar, theta = positive_int(config, _SCALE, _DEFAULTS), _local_theta(local, arch.head_dim)
    return replace(
        arch,
        local_rope_theta=theta if arch.windowed_layers else None,
        attention_scale=None if scalar == arch.head_dim else scalar**-0.5,
        activation="gelu_tanh",
        zero_centered_norms=True,
        post_norms=True,
        scaled_embeddings=True,
    )


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    theta = _DEFAULTS[_LOCAL] if arch.local_rope_theta is None else arch.local_rope_theta
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_parameters": {FULL: write_rope(arch)["rope_parameters"], SLIDING: local},
        _LOCAL: theta,
        _SCALE: arch.head_dim if arch.attention_scale is None else round(arch.attention_scale**-2),
        "hidden_activation": _ACTIVATION,
        "attention_bias": False,
        **({"architectures": ["Gemma3TextForSequenceClassification"]} if arch.value_head else {}),
    }


_DECODER = decoder_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    params=(
        *ATTENTION,
        _post_norm("attention", "self_attn_bda", "attention_out_norm"),
        replace(DENSE_MLP[0], hf=("model.layers.{layer}.pre_feedforward_layernorm.weight",)),
        *DENSE_MLP[1:],
        _post_norm("feedforward", "mlp_bda", "mlp_out_norm"),
        *HEAD,
    ),
    keys=config_keys(
        _LOCAL,
        _SCALE,
        PATTERN,
        required_values={
            "hidden_act": (_ACTIVATION, "the activation must be GELU in its approximation with tanh"),
            "hidden_activation": (_ACTIVATION, "the activation must be GELU in its approximation with tanh"),
            "attention_bias": (False, "it adds a bias to the output projection"),
            "attn_logit_softcapping": (None, _CAPPED),
            "final_logit_softcapping": (None, _CAPPED),
            "use_bidirectional_attention": (False, "a token must not attend to later ones"),
        },
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    qk_norm=True,
    windows=BY_PATTERN,
    rope=RopeRules(("default", "linear")),
)

FAMILY = replace(_DECODER, arch_from_hf=_arch_from_hf, vllm_windows=lambda arch: arch.windowed_layers)
