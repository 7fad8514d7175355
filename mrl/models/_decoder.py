"""Pre-norm decoder that all families share: its parameter table and the conversion between config.json and ArchSpec.

A family's own file has only what differs: a default, a bias, a norm. No file is read here, `hf_config.py` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError
from mrl.models._positions import position_limit
from mrl.models._rope import RopeRules, read_rope, write_rope
from mrl.models._values import flag, positive_float, positive_int, value_of
from mrl.models._windows import NO_WINDOW, WindowRule
from mrl.models.base import (
    Activation,
    ArchSpec,
    ConfigKeys,
    Family,
    LayerKind,
    MoeSpec,
    ParamSpec,
    PipelineStage,
    ShardKind,
)

ATTENTION: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.embed_tokens.weight",),
        shapes=("vocab hidden",),
        megatron="embedding.word_embeddings.weight",
        native="embed",
        trtllm=("transformer.vocab_embedding.weight",),
        kind=ShardKind.VOCAB,
        place=PipelineStage.FIRST,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.input_layernorm.weight",),
        shapes=("hidden",),
        megatron="decoder.layers.{layer}.input_layernorm.weight",
        megatron_te="decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
        native="layers.{layer}.input_norm",
        trtllm=("transformer.layers.{layer}.input_layernorm.weight",),
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
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
        kind=ShardKind.QKV,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
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
        kind=ShardKind.QKV,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
        when=lambda arch: arch.qkv_bias,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.q_norm.weight",),
        shapes=("head",),
        megatron="decoder.layers.{layer}.self_attention.q_layernorm.weight",
        native="layers.{layer}.q_norm",
        trtllm=("transformer.layers.{layer}.attention.q_layernorm.weight",),
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
        when=lambda arch: arch.qk_norm,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.k_norm.weight",),
        shapes=("head",),
        megatron="decoder.layers.{layer}.self_attention.k_layernorm.weight",
        native="layers.{layer}.k_norm",
        trtllm=("transformer.layers.{layer}.attention.k_layernorm.weight",),
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
        when=lambda arch: arch.qk_norm,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.o_proj.weight",),
        shapes=("hidden q",),
        megatron="decoder.layers.{layer}.self_attention.linear_proj.weight",
        native="layers.{layer}.o",
        trtllm=("transformer.layers.{layer}.attention.dense.weight",),
        kind=ShardKind.ROW,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.o_proj.bias",),
        shapes=("hidden",),
        megatron="decoder.layers.{layer}.self_attention.linear_proj.bias",
        native="layers.{layer}.o_bias",
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
        when=lambda arch: arch.output_bias,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.self_attn.sinks",),
        shapes=("heads",),
        megatron="decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
        native="layers.{layer}.sinks",
        kind=ShardKind.COLUMN,
        place=PipelineStage.LAYER,
        layers=LayerKind.SOFTMAX,
        when=lambda arch: arch.attention_sinks,
    ),
)
"""Embedding, and the attention half of a decoder layer."""

DENSE_MLP: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.layers.{layer}.post_attention_layernorm.weight",),
        shapes=("hidden",),
        megatron="decoder.layers.{layer}.pre_mlp_layernorm.weight",
        megatron_te="decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
        native="layers.{layer}.post_norm",
        trtllm=("transformer.layers.{layer}.post_layernorm.weight",),
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAYER,
        layers=LayerKind.DENSE,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        shapes=("ffn hidden", "ffn hidden"),
        megatron="decoder.layers.{layer}.mlp.linear_fc1.weight",
        native="layers.{layer}.gate_up",
        trtllm=("transformer.layers.{layer}.mlp.fc.weight", "transformer.layers.{layer}.mlp.gate.weight"),
        kind=ShardKind.GATE_UP,
        place=PipelineStage.LAYER,
        layers=LayerKind.DENSE,
    ),
    ParamSpec(
        hf=("model.layers.{layer}.mlp.down_proj.weight",),
        shapes=("hidden ffn",),
        megatron="decoder.layers.{layer}.mlp.linear_fc2.weight",
        native="layers.{layer}.down",
        trtllm=("transformer.layers.{layer}.mlp.proj.weight",),
        kind=ShardKind.ROW,
        place=PipelineStage.LAYER,
        layers=LayerKind.DENSE,
    ),
)
"""MLP half of a decoder layer: the norm and the dense MLP."""

HEAD: tuple[ParamSpec, ...] = (
    ParamSpec(
        hf=("model.norm.weight",),
        shapes=("hidden",),
        megatron="decoder.final_layernorm.weight",
        native="final_norm",
        trtllm=("transformer.ln_f.weight",),
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAST,
    ),
    ParamSpec(
        hf=("lm_head.weight",),
        shapes=("vocab hidden",),
        megatron="output_layer.weight",
        native="lm_head",
        trtllm=("lm_head.weight",),
        kind=ShardKind.VOCAB,
        place=PipelineStage.LAST,
        when=lambda arch: not arch.tie_word_embeddings and not arch.value_head,
    ),
    ParamSpec(
        hf=("score.weight",),
        shapes=("one hidden",),
        megatron="output_layer.weight",
        native="value_head",
        kind=ShardKind.REPLICATED,
        place=PipelineStage.LAST,
        when=lambda arch: arch.value_head,
    ),
)
"""Final norm, and the output layer or the value head."""

DECODER = ATTENTION + DENSE_MLP + HEAD
"""Parameters of a dense model."""

DEFAULTS: Mapping[str, Any] = {"head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Values that transformers assumes in most families for keys missing from config.json."""

ANY_SCALING = RopeRules()
"""Rotary settings of most families: every type, on the entire head."""

HIDDEN_ACT: Mapping[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
"""`ArchSpec.activation` -> transformers' name."""

MAX_LAYERS, MAX_EXPERTS = 2000, 200_000
"""Limits on the number of layers, and on the number of experts summed over layers."""


def arch_from_config(
    config: Mapping[str, Any],
    *,
    family: str,
    defaults: Mapping[str, Any],
    qkv_bias: bool | str = False,
    qk_norm: bool | str = False,
    moe: MoeSpec | None = None,
    windows: WindowRule = NO_WINDOW,
    rope: RopeRules = ANY_SCALING,
) -> ArchSpec:
    """Converts the config.json of a llama-like decoder into an ArchSpec.

    Args:
        config: Parsed config.json.
        family: File name in `mrl/models`.
        defaults: Values that transformers assumes for missing keys.
        qkv_bias: See `ArchSpec`; or the key of config.json that says so.
        qk_norm: See `ArchSpec`; or the key of config.json that says so.
        moe: See `ArchSpec`.
        windows: Rule for the layers with a sliding window and its size.
        rope: Rotary settings that the family has.

    Raises:
        UserError: A key is missing or has the wrong type, sizes are inconsistent, or mrl does not implement the
            structure.
    """
    layers = positive_int(config, "num_hidden_layers", defaults, most=MAX_LAYERS)
    if moe is not None and layers * moe.num_experts > MAX_EXPERTS:
        raise UserError(f"config.json: {layers} layers of {moe.num_experts} experts; expected at most {MAX_EXPERTS}.")
    heads = positive_int(config, "num_attention_heads", defaults)
    hidden = positive_int(config, "hidden_size", defaults)
    kv_heads = _kv_heads(config, defaults, heads)
    head_dim = _head_dim(config, defaults, hidden, heads)
    positions = read_rope(config, {"rope_theta": 10000.0, **defaults}, rope, head_dim=head_dim)
    window, windowed = windows.read(config, {"sliding_window": None, **defaults}, layers)
    arch = ArchSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size", defaults),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive_int(config, "vocab_size", defaults),
        max_position_embeddings=positive_int(config, "max_position_embeddings", defaults),
        rms_norm_eps=positive_float(config, "rms_norm_eps", defaults),
        rope_theta=positions.rope_theta,
        tie_word_embeddings=flag(config, "tie_word_embeddings", defaults),
        qkv_bias=flag(config, qkv_bias, defaults) if isinstance(qkv_bias, str) else qkv_bias,
        qk_norm=flag(config, qk_norm, defaults) if isinstance(qk_norm, str) else qk_norm,
        rope_scaling=positions.rope_scaling,
        partial_rotary_factor=positions.partial_rotary_factor,
        moe=moe,
        sliding_window=window,
        windowed_layers=windowed,
    )
    if window is None or window < position_limit(arch) or windows.has_other_effects:
        return arch
    return replace(arch, sliding_window=None, windowed_layers=())  # the window hides no token


def _kv_heads(config: Mapping[str, Any], defaults: Mapping[str, Any], heads: int) -> int:
    missing = value_of(config, "num_key_value_heads", defaults) is None
    kv_heads = heads if missing else positive_int(config, "num_key_value_heads", defaults)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})."
        )
    return kv_heads


def decoder_family(
    model_type: str,
    architecture: str,
    *,
    keys: ConfigKeys,
    defaults: Mapping[str, Any],
    fixed: Callable[[ArchSpec], Mapping[str, Any]],
    params: tuple[ParamSpec, ...] = DECODER,
    moe: Callable[..., MoeSpec] | None = None,
    windows: WindowRule = NO_WINDOW,
    trtllm_architecture: str | None = None,
    extra_layers: bool = False,
    fused_experts: bool = False,
    **structure: Any,
) -> Family:
    """Builds the `Family` of a llama-like decoder.

    Args:
        model_type: `Family.hf_model_type`, equal to the file name in `mrl/models`.
        architecture: `Family.hf_architecture`.
        keys: `Family.keys`.
        defaults: Values that transformers assumes for missing keys, where they differ from `DEFAULTS`.
        fixed: Function from an ArchSpec to the family's own keys of config.json.
        params: `Family.params`.
        moe: `_moe.moe_spec` with the family's key names bound; None: dense.
        windows: Rule for the layers with a sliding window and its size.
        trtllm_architecture: `Family.trtllm_architecture`; None: TensorRT-LLM has no such model.
        extra_layers: `Family.extra_layers`.
        fused_experts: `Family.fused_experts`.
        **structure: Further arguments of `arch_from_config`.
    """
    known = {**DEFAULTS, **defaults}

    def arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
        experts = None if moe is None else moe(config, defaults=known)
        return arch_from_config(config, family=model_type, defaults=known, moe=experts, windows=windows, **structure)

    def arch_to_hf(arch: ArchSpec) -> dict[str, Any]:
        own = {**windows.to_hf(arch), **fixed(arch)}
        return config_from_arch(arch, model_type=model_type, architecture=architecture, fixed=own)

    return Family(
        hf_model_type=model_type,
        hf_architecture=architecture,
        params=params,
        keys=keys,
        arch_from_hf=arch_from_hf,
        arch_to_hf=arch_to_hf,
        trtllm_architecture=trtllm_architecture,
        extra_layers=extra_layers,
        fused_experts=fused_experts,
    )


def _head_dim(config: Mapping[str, Any], defaults: Mapping[str, Any], hidden: int, heads: int) -> int:
    if value_of(config, "head_dim", defaults) is not None or defaults["head_dim"] is not None:
        head_dim = positive_int(config, "head_dim", defaults)
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise UserError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); set head_dim."
        )
    if head_dim % 2:
        raise UserError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one.")
    return head_dim


def config_from_arch(arch: ArchSpec, *, model_type: str, architecture: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model; `fixed` adds the family's own keys."""
    critic = {"id2label": {"0": "value"}, "label2id": {"value": 0}} if arch.value_head else {}
    return {
        "architectures": [architecture.replace("CausalLM", "SequenceClassification") if critic else architecture],
        "model_type": model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": HIDDEN_ACT[arch.activation],
        "max_position_embeddings": arch.max_position_embeddings,
        "rms_norm_eps": arch.rms_norm_eps,
        "tie_word_embeddings": arch.tie_word_embeddings,
        **write_rope(arch),
        **critic,
        **fixed,
    }
