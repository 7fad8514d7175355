"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, experts chosen by biased sigmoid scores within groups.

The layer for multi-token prediction in published checkpoints is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.models._decoder import DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import OF_TRANSFORMERS, TRAINING, config_keys
from mrl.models._mla import MLA, MLA_KEYS, MLA_REQUIRED, MLA_ROPE, mla_keys, with_latent_attention, with_rotary_head
from mrl.models._moe import QWEN_MLP, moe_layer, selection_bias, shared_expert, sigmoid_keys, sigmoid_moe_spec
from mrl.models.base import ArchSpec, MoeSpec, mla_of, moe_of

_MTP = "the layers for multi-token prediction are not loaded"
_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 18432,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}


def _moe(config: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> MoeSpec:
    return sigmoid_moe_spec(config, defaults)


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    return {
        **mla_keys(mla_of(arch)),
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        **sigmoid_keys(moe_of(arch)),
    }


_TABLE = decoder_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    params=(
        *MLA,
        *DENSE_MLP,
        *moe_layer(QWEN_MLP),
        selection_bias(f"{QWEN_MLP}gate.e_score_correction_bias"),
        *shared_expert(QWEN_MLP, "shared_experts"),
        *HEAD,
    ),
    keys=config_keys(
        *MLA_KEYS,
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
        required_values={
            **MLA_REQUIRED,
            "rope_interleave": (True, "the pairs of a rotation must be neighbours"),
            "scoring_func": ("sigmoid", "experts must be chosen by sigmoid scores"),
            "topk_method": ("noaux_tc", "experts must be chosen by scores with a bias"),
            "moe_layer_freq": (1, "every layer after the dense ones must have experts"),
        },
        without_effect={
            "num_nextn_predict_layers": _MTP,
            "num_mtp_layers": _MTP,
            "output_router_logits": OF_TRANSFORMERS,
            "pretraining_tp": OF_TRANSFORMERS,
            "ep_size": OF_TRANSFORMERS,
            "seq_aux": TRAINING,
            "aux_loss_alpha": TRAINING,
        },
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    rope=MLA_ROPE,
    moe=_moe,
    extra_layers=True,
)


def _arch_from_hf(config: dict[str, Any]) -> ArchSpec:
    return with_latent_attention(_TABLE.arch_from_hf(with_rotary_head(config, _DEFAULTS)), config, _DEFAULTS)


FAMILY = replace(_TABLE, arch_from_hf=_arch_from_hf, aliases=("kimi_k2",))
