"""Qwen 3 with experts: qwen3's attention, and a mixture of experts in place of the MLP.

transformers 5 writes the number of experts as `num_local_experts`, older versions as `num_experts`: both are read and
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.models._decoder import ATTENTION, HEAD, arch_from_config, config_from_arch
from mrl.models._keys import any_layer_slides, config_keys
from mrl.models._moe import QWEN_KEYS, QWEN_MLP, ROUTER_WITHOUT_EFFECT, experts_key, moe_layer, moe_spec, qwen_keys
from mrl.models._values import flag
from mrl.models.base import ArchSpec, Family, moe_of

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "sliding_window": 4096,
}


def arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    """As `Family.arch_from_hf`."""
    moe = moe_spec(
        config,
        defaults=_DEFAULTS,
        num_experts=experts_key(config),
        intermediate_size="moe_intermediate_size",
        norm_topk_prob=flag(config, "norm_topk_prob", _DEFAULTS),
    )
    return arch_from_config(
        config, family="qwen3_moe", defaults=_DEFAULTS, qk_norm=True, moe=moe, slides=any_layer_slides
    )


def arch_to_hf(arch: ArchSpec) -> dict[str, Any]:
    """As `Family.arch_to_hf`."""
    moe = moe_of(arch)
    return config_from_arch(
        arch,
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={
            "attention_bias": False,
            "use_sliding_window": False,
            "num_local_experts": moe.num_experts,
            **qwen_keys(moe),
        },
    )


FAMILY = Family(
    hf_model_type="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    params=(*ATTENTION, *moe_layer(QWEN_MLP), *HEAD),
    keys=config_keys(
        *QWEN_KEYS,
        "num_local_experts",
        held={"attention_bias": (False, "it puts a bias on the output projection")},
        without_effect=ROUTER_WITHOUT_EFFECT,
    ),
    arch_from_hf=arch_from_hf,
    arch_to_hf=arch_to_hf,
    trtllm_architecture="Qwen3MoeForCausalLM",
)
