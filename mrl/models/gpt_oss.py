"""gpt-oss: attention sinks, alternating windows, experts in every layer with biases and a clamped activation.

The published checkpoints have experts in MXFP4, which are dequantized when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError
from mrl.models._decoder import ATTENTION, HEAD, decoder_family
from mrl.models._keys import OF_TRANSFORMERS, config_keys
from mrl.models._moe import QWEN_MLP, ROUTER_WITHOUT_EFFECT, experts_key, moe_biases, moe_layer, moe_spec
from mrl.models._windows import ALTERNATING
from mrl.models.base import ArchSpec, MoeSpec, moe_of

LIMIT, ALPHA = 7.0, 1.702
"""Numbers of the clamped activation; transformers 4 reads neither from config.json."""

_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary scaling that transformers assumes if config.json has none."""

_EXPERTS = moe_layer(QWEN_MLP, router="router")
_ONE_ACTIVATION = "versions of transformers differ in whether they read it"


def _moe(config: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> MoeSpec:
    spec = moe_spec(config, defaults=defaults, num_experts_key=experts_key, intermediate_size="intermediate_size")
    return replace(spec, biases=True, activation_limit=LIMIT)


def _with_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json with the rotary scaling that transformers assumes."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    empty = [key for key in ("rope_scaling", "rope_parameters") if config.get(key, _YARN) in (None, {})]
    if empty and (empty[0] == "rope_scaling" or config[empty[0]] is not None):
        raise UserError(
            f"config.json: {empty[0]} is empty: versions of transformers differ in whether this model has scaled "
            "positions. Set rope_parameters, with rope_type 'default' if it has none."
        )
    return {**config, "rope_scaling": dict(_YARN)}


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    moe = moe_of(arch)
    return {
        "attention_bias": True,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
    }


_TABLE = decoder_family(
    "gpt_oss",
    "GptOssForCausalLM",
    params=(*ATTENTION, *_EXPERTS, *moe_biases(_EXPERTS), *HEAD),
    keys=config_keys(
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        required_values={
            "attention_bias": (True, "attention has biases in all of its projections"),
            "swiglu_alpha": (ALPHA, _ONE_ACTIVATION),
            "swiglu_limit": (LIMIT, _ONE_ACTIVATION),
        },
        without_effect={**ROUTER_WITHOUT_EFFECT, "output_router_logits": OF_TRANSFORMERS},
    ),
    defaults={
        "intermediate_size": 2880,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "num_experts": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    fixed=_own_keys,
    qkv_bias=True,
    moe=_moe,
    windows=ALTERNATING,
    fused_experts=True,
)


def _arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    arch = _TABLE.arch_from_hf(dict(_with_scaling(config)))
    return replace(arch, output_bias=True, attention_sinks=True)


FAMILY = replace(
    _TABLE,
    arch_from_hf=_arch_from_hf,
    vllm_names=((".self_attn.", ".attn."), ("model.embed_tokens.", "model.embedding.")),
    vllm_windows=lambda arch: tuple(range(0, arch.num_layers, 2)),
)
