"""DeepSeek-V3 and R1, Moonlight, Kimi-K2: latent attention, experts chosen by biased sigmoid scores within groups.

The layer for multi-token prediction in published checkpoints is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.models._decoder import DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import PREDICTION, config_keys
from mrl.models._mla import MLA, MLA_KEYS, MLA_REQUIRED, MLA_ROPE, MLA_WITHOUT_EFFECT, latent_family, mla_keys
from mrl.models._moe import QWEN_MLP, moe_layer, selection_bias, shared_expert, sigmoid_keys, sigmoid_moe_spec
from mrl.models.base import ArchSpec, mla_of, moe_of

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
        },
        without_effect={
            "num_nextn_predict_layers": PREDICTION,
            "num_mtp_layers": PREDICTION,
            **MLA_WITHOUT_EFFECT,
        },
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    rope=MLA_ROPE,
    moe=sigmoid_moe_spec,
    extra_layers=True,
)

FAMILY = latent_family(_TABLE, _DEFAULTS, aliases=("kimi_k2",))
