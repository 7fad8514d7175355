"""Qwen3.5 with experts, the text model: Qwen3.5's attention, experts in every layer, and a gated shared expert.

The layers for multi-token prediction in published checkpoints are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mrl.models._decoder import HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._linear_attention import (
    IN_PARTS,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    LINEAR_REQUIRED,
    LINEAR_WITHOUT_EFFECT,
    TEXT_ROPE,
    linear_keys,
    mixed_attention,
    with_linear_attention,
    without_layer_types,
)
from mrl.models._moe import QWEN_MLP, ROUTER_WITHOUT_EFFECT, experts_key, moe_layer, moe_spec, shared_expert
from mrl.models._values import positive_int
from mrl.models.base import ArchSpec, moe_of

_WIDTH = "moe_intermediate_size"
_DEFAULTS: Mapping[str, Any] = {
    **LINEAR_DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    _WIDTH: 512,
    "shared_expert_intermediate_size": 512,
}


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    moe = moe_of(arch)
    return {
        **linear_keys(arch),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        _WIDTH: moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
    }


_TABLE = decoder_family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    params=(*mixed_attention(IN_PARTS), *moe_layer(QWEN_MLP), *shared_expert(QWEN_MLP), *HEAD),
    keys=config_keys(
        *LINEAR_KEYS,
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        _WIDTH,
        "shared_expert_intermediate_size",
        required_values=LINEAR_REQUIRED,
        without_effect={**ROUTER_WITHOUT_EFFECT, **LINEAR_WITHOUT_EFFECT},
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    qk_norm=True,
    rope=TEXT_ROPE,
    moe=partial(moe_spec, num_experts_key=experts_key, shared_intermediate_size="shared_expert_intermediate_size"),
    extra_layers=True,
)


def _arch_from_hf(config: dict[str, Any]) -> ArchSpec:
    # no layer has a dense MLP, and transformers has no width of one
    known = {**without_layer_types(config), "intermediate_size": positive_int(config, _WIDTH, _DEFAULTS)}
    return with_linear_attention(_TABLE.arch_from_hf(known), config, _DEFAULTS)


FAMILY = replace(_TABLE, arch_from_hf=_arch_from_hf)
