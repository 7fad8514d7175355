"""Qwen 2 MoE: Qwen 2's attention, experts instead of the MLP, and a gated shared expert."""

from functools import partial

from mrl.models._decoder import ATTENTION, DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._moe import (
    QWEN_KEYS,
    QWEN_MLP,
    ROUTER_WITHOUT_EFFECT,
    moe_layer,
    moe_spec,
    qwen_dense_layers,
    qwen_keys,
    shared_expert,
)
from mrl.models._windows import NAMED_LAYERS
from mrl.models.base import moe_of

FAMILY = decoder_family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    trtllm_architecture="Qwen2MoeForCausalLM",
    params=(*ATTENTION, *DENSE_MLP, *moe_layer(QWEN_MLP), *shared_expert(QWEN_MLP), *HEAD),
    keys=config_keys(
        *QWEN_KEYS,
        "qkv_bias",
        "shared_expert_intermediate_size",
        without_effect=ROUTER_WITHOUT_EFFECT,
    ),
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "qkv_bias": True,
    },
    fixed=lambda arch: {
        "qkv_bias": arch.qkv_bias,
        "shared_expert_intermediate_size": moe_of(arch).shared_intermediate_size,
        **qwen_keys(moe_of(arch)),
    },
    moe=partial(
        moe_spec,
        num_experts_key=lambda config: "num_experts",
        shared_intermediate_size="shared_expert_intermediate_size",
        dense_layers=qwen_dense_layers,
    ),
    qkv_bias="qkv_bias",
    windows=NAMED_LAYERS,
)
