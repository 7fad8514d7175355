"""Qwen 3 MoE: Qwen 3's attention, and experts instead of the MLP.

Both keys for the number of experts are read and written: `num_local_experts` is transformers 5's, `num_experts` that of
older versions.
"""

from functools import partial

from mrl.models._decoder import ATTENTION, DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._moe import (
    QWEN_KEYS,
    QWEN_MLP,
    ROUTER_WITHOUT_EFFECT,
    experts_key,
    moe_layer,
    moe_spec,
    qwen_dense_layers,
    qwen_keys,
)
from mrl.models._windows import ALL_IF_USED
from mrl.models.base import moe_of

FAMILY = decoder_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    trtllm_architecture="Qwen3MoeForCausalLM",
    params=(*ATTENTION, *DENSE_MLP, *moe_layer(QWEN_MLP), *HEAD),
    keys=config_keys(
        *QWEN_KEYS,
        "num_local_experts",
        required_values={"attention_bias": (False, "it adds a bias to the output projection")},
        without_effect=ROUTER_WITHOUT_EFFECT,
    ),
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
    fixed=lambda arch: {
        "attention_bias": False,
        "num_local_experts": moe_of(arch).num_experts,
        **qwen_keys(moe_of(arch)),
    },
    moe=partial(moe_spec, num_experts_key=experts_key, dense_layers=qwen_dense_layers),
    qk_norm=True,
    windows=ALL_IF_USED,
)
