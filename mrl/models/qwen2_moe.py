"""Qwen 2 with experts: qwen2's attention, a mixture of experts, and a shared expert behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.models._decoder import ATTENTION, HEAD, arch_from_config, config_from_arch
from mrl.models._keys import any_layer_slides, config_keys
from mrl.models._moe import QWEN_KEYS, QWEN_MLP, ROUTER_WITHOUT_EFFECT, moe_layer, moe_spec, qwen_keys, shared_expert
from mrl.models._values import flag
from mrl.models.base import ArchSpec, Family, moe_of

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 16,
    "head_dim": None,
    "intermediate_size": 5632,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "sliding_window": 4096,
}


def arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    """As `Family.arch_from_hf`."""
    moe = moe_spec(
        config,
        defaults=_DEFAULTS,
        num_experts="num_experts",
        intermediate_size="moe_intermediate_size",
        norm_topk_prob=flag(config, "norm_topk_prob", _DEFAULTS),
        shared_intermediate_size="shared_expert_intermediate_size",
    )
    qkv_bias = flag(config, "qkv_bias", {"qkv_bias": True})
    return arch_from_config(
        config, family="qwen2_moe", defaults=_DEFAULTS, qkv_bias=qkv_bias, moe=moe, slides=any_layer_slides
    )


def arch_to_hf(arch: ArchSpec) -> dict[str, Any]:
    """As `Family.arch_to_hf`."""
    moe = moe_of(arch)
    return config_from_arch(
        arch,
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={
            "qkv_bias": arch.qkv_bias,
            "use_sliding_window": False,
            "shared_expert_intermediate_size": moe.shared_intermediate_size,
            **qwen_keys(moe),
        },
    )


FAMILY = Family(
    hf_model_type="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    params=(*ATTENTION, *moe_layer(QWEN_MLP), *shared_expert(QWEN_MLP), *HEAD),
    keys=config_keys(
        *QWEN_KEYS,
        "qkv_bias",
        "shared_expert_intermediate_size",
        without_effect=ROUTER_WITHOUT_EFFECT,
    ),
    arch_from_hf=arch_from_hf,
    arch_to_hf=arch_to_hf,
    trtllm_architecture="Qwen2MoeForCausalLM",
)
