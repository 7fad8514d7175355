"""Qwen3-Next: three gated delta nets for each layer of gated softmax attention, and experts with a shared expert.

The layers for multi-token prediction in published checkpoints are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mrl.models._decoder import DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._linear_attention import (
    IN_ONE,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    LINEAR_REQUIRED,
    LINEAR_ROPE,
    LINEAR_WITHOUT_EFFECT,
    linear_keys,
    mixed_attention,
    with_linear_attention,
    without_layer_types,
)
from mrl.models._moe import (
    QWEN_KEYS,
    QWEN_MLP,
    ROUTER_WITHOUT_EFFECT,
    experts_key,
    moe_layer,
    moe_spec,
    qwen_dense_layers,
    qwen_keys,
    shared_expert,
)
from mrl.models.base import ArchSpec, moe_of

_DEFAULTS: Mapping[str, Any] = {
    **LINEAR_DEFAULTS,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    return {
        **linear_keys(arch),
        "shared_expert_intermediate_size": moe_of(arch).shared_intermediate_size,
        **qwen_keys(moe_of(arch)),
    }


_TABLE = decoder_family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    params=(
        *mixed_attention(IN_ONE),
        *DENSE_MLP,
        *moe_layer(QWEN_MLP),
        *shared_expert(QWEN_MLP),
        *HEAD,
    ),
    keys=config_keys(
        *LINEAR_KEYS,
        *QWEN_KEYS,
        "num_local_experts",
        "shared_expert_intermediate_size",
        required_values=LINEAR_REQUIRED,
        without_effect={**ROUTER_WITHOUT_EFFECT, **LINEAR_WITHOUT_EFFECT},
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    qk_norm=True,
    rope=LINEAR_ROPE,
    moe=partial(
        moe_spec,
        num_experts_key=experts_key,
        shared_intermediate_size="shared_expert_intermediate_size",
        dense_layers=qwen_dense_layers,
    ),
    extra_layers=True,
)


def _arch_from_hf(config: dict[str, Any]) -> ArchSpec:
    return with_linear_attention(_TABLE.arch_from_hf(without_layer_types(config)), config, _DEFAULTS)


FAMILY = replace(_TABLE, arch_from_hf=_arch_from_hf)
