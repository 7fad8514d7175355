"""Mixtral: the plain decoder with a mixture of experts; the chosen experts' probabilities sum to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.models._decoder import ATTENTION, HEAD, arch_from_config, config_from_arch
from mrl.models._keys import TRAINING, config_keys
from mrl.models._moe import ROUTER_WITHOUT_EFFECT, experts_key, moe_layer, moe_spec
from mrl.models.base import ArchSpec, Family, moe_of

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}


def arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    """As `Family.arch_from_hf`."""
    moe = moe_spec(
        config,
        defaults=_DEFAULTS,
        num_experts=experts_key(config),
        intermediate_size="intermediate_size",
        norm_topk_prob=True,
    )
    return arch_from_config(config, family="mixtral", defaults=_DEFAULTS, moe=moe)


def arch_to_hf(arch: ArchSpec) -> dict[str, Any]:
    """As `Family.arch_to_hf`."""
    moe = moe_of(arch)
    return config_from_arch(
        arch,
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        fixed={
            "sliding_window": None,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
        },
    )


FAMILY = Family(
    hf_model_type="mixtral",
    hf_architecture="MixtralForCausalLM",
    params=(
        *ATTENTION,
        *moe_layer("model.layers.{layer}.block_sparse_moe.", gate="w1", up="w3", down="w2"),
        *HEAD,
    ),
    keys=config_keys(
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        without_effect={
            **ROUTER_WITHOUT_EFFECT,
            "router_jitter_noise": TRAINING,
        },
    ),
    arch_from_hf=arch_from_hf,
    arch_to_hf=arch_to_hf,
    trtllm_architecture="MixtralForCausalLM",
)
