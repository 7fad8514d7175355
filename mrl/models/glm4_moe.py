"""GLM-4.5 and 4.6: partly rotated heads, dense first layers, experts chosen by biased sigmoid scores, shared experts.

The layer for multi-token prediction in published checkpoints is not loaded.
"""

from __future__ import annotations

from typing import Any

from mrl.models._decoder import ATTENTION, DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import OF_TRANSFORMERS, PREDICTION, config_keys
from mrl.models._moe import QWEN_MLP, moe_layer, selection_bias, shared_expert, sigmoid_keys, sigmoid_moe_spec
from mrl.models._rope import RopeRules
from mrl.models.base import ArchSpec, moe_of


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    return {
        "attention_bias": arch.qkv_bias,
        "use_qk_norm": arch.qk_norm,
        "partial_rotary_factor": arch.partial_rotary_factor,
        "num_nextn_predict_layers": 0,
        **sigmoid_keys(moe_of(arch)),
    }


FAMILY = decoder_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    params=(
        *ATTENTION,
        *DENSE_MLP,
        *moe_layer(QWEN_MLP, vllm_router="float32"),
        selection_bias(f"{QWEN_MLP}gate.e_score_correction_bias"),
        *shared_expert(QWEN_MLP, "shared_experts"),
        *HEAD,
    ),
    keys=config_keys(
        "attention_bias",
        "use_qk_norm",
        "n_routed_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "norm_topk_prob",
        without_effect={
            "num_nextn_predict_layers": PREDICTION,
            "num_mtp_layers": PREDICTION,
            "output_router_logits": OF_TRANSFORMERS,
        },
    ),
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    fixed=_own_keys,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    rope=RopeRules(partial=True),
    moe=sigmoid_moe_spec,
    extra_layers=True,
)
