"""The pre-norm decoder that the families share: its rows, and config.json <-> ArchSpec.

Owns what these families have in common; what differs (a default, a bias, a norm) stands in the family's own file. It
reads no file: `hf_config.py` does.

Spelling of rotary settings: transformers 5 keeps them in `rope_parameters`, older versions in `rope_theta` and
`rope_scaling`. Both are read; both are written, so that either version loads the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError
from mrl.models.base import ArchSpec, Kind, MoeSpec, ParamSpec, Place, RopeScaling

ATTENTION: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.embed_tokens.weight",),
        shapes=("vocab hidden",),
        megatron="embedding.word_embeddings.weight",
        native="embed",
        trtllm=("transformer.vocab_embedding.weight",),
        kind=Kind.VOCAB,
        place=Place.FIRST,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.input_layernorm.weight",),
        shapes=("hidden",),
        megatron="decoder.layers.{layer}.input_layernorm.weight",
        megatron_te="decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
        native="layers.{layer}.input_norm",
        trtllm=("transformer.layers.{layer}.input_layernorm.weight",),
        kind=Kind.REPLICATED,
        place=Place.LAYER,
    ),
    ParamSpec(
        hf=(
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight",
        ),
        shapes=("q hidden", "kv hidden", "kv hidden"),
        megatron="decoder.layers.{layer}.self_attention.linear_qkv.weight",
        native="layers.{layer}.qkv",
        trtllm=("transformer.layers.{layer}.attention.qkv.weight",),
        kind=Kind.QKV,
        place=Place.LAYER,
    ),
    ParamSpec(
        hf=(
            "model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.bias",
        ),
        shapes=("q", "kv", "kv"),
        megatron="decoder.layers.{layer}.self_attention.linear_qkv.bias",
        native="layers.{layer}.qkv_bias",
        trtllm=("transformer.layers.{layer}.attention.qkv.bias",),
        kind=Kind.QKV,
        place=Place.LAYER,
        when=lambda arch: arch.qkv_bias,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.q_norm.weight",),
        shapes=("head",),
        megatron="decoder.layers.{layer}.self_attention.q_layernorm.weight",
        native="layers.{layer}.q_norm",
        trtllm=("transformer.layers.{layer}.attention.q_layernorm.weight",),
        kind=Kind.REPLICATED,
        place=Place.LAYER,
        when=lambda arch: arch.qk_norm,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.k_norm.weight",),
        shapes=("head",),
        megatron="decoder.layers.{layer}.self_attention.k_layernorm.weight",
        native="layers.{layer}.k_norm",
        trtllm=("transformer.layers.{layer}.attention.k_layernorm.weight",),
        kind=Kind.REPLICATED,
        place=Place.LAYER,
        when=lambda arch: arch.qk_norm,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.o_proj.weight",),
        shapes=("hidden q",),
        megatron="decoder.layers.{layer}.self_attention.linear_proj.weight",
        native="layers.{layer}.o",
        trtllm=("transformer.layers.{layer}.attention.dense.weight",),
        kind=Kind.ROW,
        place=Place.LAYER,
    ),
)
"""Embeddings, and a layer up to its MLP."""

DENSE_MLP: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.layers.{layer}.post_attention_layernorm.weight",),
        shapes=("hidden",),
        megatron="decoder.layers.{layer}.pre_mlp_layernorm.weight",
        megatron_te="decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
        native="layers.{layer}.post_norm",
        trtllm=("transformer.layers.{layer}.post_layernorm.weight",),
        kind=Kind.REPLICATED,
        place=Place.LAYER,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        shapes=("ffn hidden", "ffn hidden"),
        megatron="decoder.layers.{layer}.mlp.linear_fc1.weight",
        native="layers.{layer}.gate_up",
        trtllm=("transformer.layers.{layer}.mlp.fc.weight", "transformer.layers.{layer}.mlp.gate.weight"),
        kind=Kind.GATE_UP,
        place=Place.LAYER,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.mlp.down_proj.weight",),
        shapes=("hidden ffn",),
        megatron="decoder.layers.{layer}.mlp.linear_fc2.weight",
        native="layers.{layer}.down",
        trtllm=("transformer.layers.{layer}.mlp.proj.weight",),
        kind=Kind.ROW,
        place=Place.LAYER,
    ),
)
"""The norm before the MLP, and the MLP."""

HEAD: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.norm.weight",),
        shapes=("hidden",),
        megatron="decoder.final_layernorm.weight",
        native="final_norm",
        trtllm=("transformer.ln_f.weight",),
        kind=Kind.REPLICATED,
        place=Place.LAST,
    ),
    ParamSpec(
        hf=("lm_head.weight",),
        shapes=("vocab hidden",),
        megatron="output_layer.weight",
        native="lm_head",
        trtllm=("lm_head.weight",),
        kind=Kind.VOCAB,
        place=Place.LAST,
        when=lambda arch: not arch.tie_word_embeddings,
    ),
)
"""Behind the last layer."""

DECODER = ATTENTION + DENSE_MLP + HEAD
"""A whole dense model."""

KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
)
"""The keys of config.json that shape an `ArchSpec`."""


def arch_from_config(
    config: Mapping[str, Any],
    *,
    family: str,
    defaults: Mapping[str, Any],
    qkv_bias: bool = False,
    qk_norm: bool = False,
    moe: MoeSpec | None = None,
) -> ArchSpec:
    """config.json of a llama-like decoder -> ArchSpec.

    Args:
        config: The parsed file.
        family: File in `mrl/models`.
        defaults: What transformers assumes for keys that the file may leave out.
        qkv_bias: As in `ArchSpec`.
        qk_norm: As in `ArchSpec`.
        moe: As in `ArchSpec`.

    Raises:
        UserError: A key is missing or has the wrong type, sizes do not fit together, or the structure is one that mrl
            does not build.
    """
    refuse_foreign_structure(config, family)
    heads = whole(config, "num_attention_heads", defaults)
    hidden = whole(config, "hidden_size", defaults)
    kv_heads = (
        heads
        if _value(config, "num_key_value_heads", defaults) is None
        else whole(config, "num_key_value_heads", defaults)
    )
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})."
        )
    if _value(config, "head_dim", defaults) is not None:
        head_dim = whole(config, "head_dim", defaults)
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise UserError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); set head_dim."
        )
    if head_dim % 2:
        raise UserError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one.")
    theta, scaling = _rope(config)
    return ArchSpec(
        family=family,
        num_layers=whole(config, "num_hidden_layers", defaults),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size", defaults),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=whole(config, "vocab_size", defaults),
        max_position_embeddings=whole(config, "max_position_embeddings", defaults),
        rms_norm_eps=real(config, "rms_norm_eps", defaults),
        rope_theta=theta,
        tie_word_embeddings=flag(config, "tie_word_embeddings", defaults),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope_scaling=scaling,
        moe=moe,
    )


def config_from_arch(arch: ArchSpec, *, model_type: str, architecture: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """ArchSpec -> config.json; `fixed` are the family's own keys."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": arch.rope_theta}
    if arch.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(arch.rope_scaling)}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_position_embeddings,
        "rms_norm_eps": arch.rms_norm_eps,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "rope_parameters": rope,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling if arch.rope_scaling is not None else None,
        **fixed,
    }


def refuse_foreign_structure(config: Mapping[str, Any], family: str) -> None:
    """Raises UserError for settings under which the family's table would be the wrong model."""

    def refuse(key: str, reason: str) -> None:
        raise UserError(f"config.json: {key} is {config[key]!r}; {reason}. mrl's '{family}' does not build this.")

    if config.get("quantization_config") is not None:
        raise UserError(
            "config.json: the checkpoint is quantized (quantization_config). Training needs float weights: use the "
            "bfloat16 or float32 release of this model."
        )
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "the activation must be silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            refuse(key, "it puts a bias on the output projection" if key == "attention_bias" else "the MLP has no bias")
    if config.get("use_sliding_window") and config.get("max_window_layers", 0) < config.get("num_hidden_layers", 0):
        refuse("use_sliding_window", "all layers must attend to the whole context")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        refuse("layer_types", "all layers must be 'full_attention'")


def _value(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Any:
    if key in config:
        return config[key]
    if key in defaults:
        return defaults[key]
    raise UserError(f"config.json: '{key}' is missing.")


def whole(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> int:
    """A whole number above 0 of config.json, or its default."""
    value = _value(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}; expected a whole number above 0.")
    return value


def real(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> float:
    """A number above 0 of config.json, or its default."""
    value = _value(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise UserError(f"config.json: {key} is {value!r}; expected a number above 0.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> bool:
    """A flag of config.json, or its default."""
    value = _value(config, key, defaults)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r}; expected true or false.")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, llama3 scaling) from either spelling; transformers' own default of theta is 10000."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: the rotary settings are {rope!r}; expected a mapping with 'rope_type'.")
    theta = real({"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta", {})
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError("config.json: partial_rotary_factor is not 1; mrl rotates the whole head dimension.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"config.json: rope_type is '{kind}'; mrl builds 'default' and 'llama3'.")
    return theta, RopeScaling(
        factor=real(rope, "factor", {}),
        low_freq_factor=real(rope, "low_freq_factor", {}),
        high_freq_factor=real(rope, "high_freq_factor", {}),
        original_max_position_embeddings=whole(
            rope,
            "original_max_position_embeddings",
            {"original_max_position_embeddings": config.get("max_position_embeddings")},
        ),
    )
