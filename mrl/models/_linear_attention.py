"""Models with gated delta nets in some layers and gated softmax attention in others: parameter table, config.json.

Qwen3-Next and Qwen3.5 have them; the two differ in how the checkpoint splits the input projection. A rank stores the
rows of the input projection and of the convolution key head by key head, see `ShardKind.KEY_HEADS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._decoder import ATTENTION
from mrl.models._keys import OF_TRANSFORMERS, PREDICTION
from mrl.models._rope import RopeRules
from mrl.models._values import positive_int
from mrl.models._windows import FULL
from mrl.models.base import ArchSpec, LayerKind, LinearAttentionSpec, ParamSpec, PipelineStage, ShardKind

LINEAR = "linear_attention"
"""Value of `layer_types`."""

_INTERVAL = "full_attention_interval"
_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
"""Fields of `LinearAttentionSpec` -> keys of config.json."""

LINEAR_KEYS = (*_SIZES.values(), _INTERVAL)
"""Keys of config.json that this file reads, beside `layer_types`."""

LINEAR_DEFAULTS: Mapping[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
"""Values that transformers assumes for missing keys in these families."""

LINEAR_REQUIRED: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (False, "projections with biases are not supported in models with linear attention"),
    "attn_output_gate": (True, "softmax attention must have an output gate"),
}
LINEAR_WITHOUT_EFFECT: Mapping[str, str] = {
    "number_of_conv_states": OF_TRANSFORMERS,
    "mamba_ssm_dtype": "the state of linear attention is fp32 or wider",
    "mtp_num_hidden_layers": PREDICTION,
    "mtp_use_dedicated_embeddings": PREDICTION,
}

LINEAR_ROPE = RopeRules(partial=True)
"""Rotary settings of Qwen3-Next."""

TEXT_ROPE = RopeRules(partial=True, without_effect=("mrope_section", "mrope_interleaved"))
"""Rotary settings of Qwen3.5, whose three kinds of positions are the same in text."""

_HF = "model.layers.{layer}.linear_attn."
IN_ONE = (f"{_HF}in_proj_qkvz.weight", f"{_HF}in_proj_ba.weight"), ("linear_qkvz hidden", "linear_ba hidden")
"""Input projection of Qwen3-Next: names and shapes. Its tensors have the rows key head by key head."""

IN_PARTS = (
    (
        *(f"{_HF}in_proj_qkv.weight",) * 3,
        *(f"{_HF}in_proj_{part}.weight" for part in "zba"),
    ),
    (
        *("linear_key hidden", "linear_key hidden", "linear_value hidden", "linear_value hidden"),
        *("linear_heads hidden", "linear_heads hidden"),
    ),
)
"""Input projection of Qwen3.5: names and shapes."""


def _row(
    hf: tuple[str, ...], shapes: tuple[str, ...], megatron: str, native: str, kind: ShardKind = ShardKind.KEY_HEADS
) -> ParamSpec:
    return ParamSpec(
        hf=hf,
        shapes=shapes,
        megatron=f"decoder.layers.{{layer}}.self_attention.{megatron}",
        native=f"layers.{{layer}}.{native}",
        kind=kind,
        place=PipelineStage.LAYER,
        layers=LayerKind.LINEAR,
    )


def mixed_attention(in_proj: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[ParamSpec, ...]:
    """Returns the embedding, and the attention half of the decoder layers of both kinds.

    Args:
        in_proj: `IN_ONE` or `IN_PARTS`.
    """
    softmax = [
        replace(spec, shapes=("q_gate hidden", "kv hidden", "kv hidden"))
        if spec.kind is ShardKind.QKV and spec.shapes == ("q hidden", "kv hidden", "kv hidden")
        else spec
        for spec in ATTENTION
    ]
    return (
        *(replace(spec, trtllm=()) for spec in softmax),
        _row(*in_proj, "in_proj.weight", "linear_in"),
        _row(
            (f"{_HF}conv1d.weight",),
            ("linear_key one linear_kernel", "linear_key one linear_kernel", "linear_value one linear_kernel"),
            "conv1d.weight",
            "linear_conv",
        ),
        _row((f"{_HF}dt_bias",), ("linear_heads",), "dt_bias", "linear_dt_bias", ShardKind.COLUMN),
        _row((f"{_HF}A_log",), ("linear_heads",), "A_log", "linear_a_log", ShardKind.COLUMN),
        _row((f"{_HF}norm.weight",), ("linear_value_head",), "norm.weight", "linear_norm", ShardKind.REPLICATED),
        _row((f"{_HF}out_proj.weight",), ("hidden linear_value",), "out_proj.weight", "linear_out", ShardKind.ROW),
    )


def without_layer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json without the kinds of attention, which `with_linear_attention` reads."""
    return {key: value for key, value in config.items() if key != "layer_types"}


def with_linear_attention(arch: ArchSpec, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ArchSpec:
    """Returns the model with the linear attention, output gates and zero-centered norms that config.json has.

    Raises:
        UserError: A key is missing or wrong, or no layer has softmax attention.
    """
    layers = tuple(index for index, kind in enumerate(_layer_types(config, arch.num_layers)) if kind == LINEAR)
    if len(layers) == arch.num_layers:
        raise UserError(
            f"config.json: all {len(layers)} layers have linear attention, and transformers runs no such model. Set "
            f"{_INTERVAL} to at most {len(layers)}, or name '{FULL}' in layer_types."
        )
    sizes = {field: positive_int(config, key, defaults) for field, key in _SIZES.items()}
    if sizes["num_value_heads"] % sizes["num_key_heads"]:
        raise UserError(
            f"config.json: linear_num_value_heads ({sizes['num_value_heads']}) is not a multiple of "
            f"linear_num_key_heads ({sizes['num_key_heads']})."
        )
    return replace(
        arch,
        output_gate=True,
        zero_centered_norms=True,
        linear_attention=LinearAttentionSpec(layers, **sizes) if layers else None,
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Returns the kind of attention of each layer."""
    types = config.get("layer_types")
    if types is None:
        interval = positive_int(config, _INTERVAL, {_INTERVAL: 4})
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in (FULL, LINEAR) for kind in types):
        raise UserError(
            f"config.json: layer_types is {shown(types)}; expected '{FULL}' or '{LINEAR}' for each of the {layers} "
            "layers."
        )
    return types


def linear_keys(arch: ArchSpec) -> dict[str, Any]:
    """Returns the keys of config.json that `with_linear_attention` reads."""
    linear = arch.linear_attention
    sizes = {} if linear is None else {key: getattr(linear, field) for field, key in _SIZES.items()}
    kinds = [LINEAR if layer in arch.linear_layers else FULL for layer in range(arch.num_layers)]
    return {**sizes, "layer_types": kinds, "attention_bias": False}
