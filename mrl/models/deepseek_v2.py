"""DeepSeek-V2-Lite: latent attention with queries from the hidden state, experts chosen by their softmax, shared ones.

Also larger models of this structure whose experts are not chosen within groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.models._decoder import DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._mla import MLA, MLA_KEYS, MLA_REQUIRED, MLA_ROPE, MLA_WITHOUT_EFFECT, latent_family, mla_keys
from mrl.models._moe import QWEN_MLP, moe_layer, shared_expert, softmax_keys, softmax_moe_spec
from mrl.models.base import ArchSpec, mla_of, moe_of

_UNUSED_GROUPS = "experts are not chosen within groups"
_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}


def _own_keys(arch: ArchSpec) -> dict[str, Any]:
    return {
        **mla_keys(mla_of(arch)),
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        **softmax_keys(moe_of(arch)),
    }


_TABLE = decoder_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    params=(
        *MLA,
        *DENSE_MLP,
        *moe_layer(QWEN_MLP),
        *shared_expert(QWEN_MLP, "shared_experts"),
        *HEAD,
    ),
    keys=config_keys(
        *MLA_KEYS,
        "n_routed_experts",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "routed_scaling_factor",
        "first_k_dense_replace",
        required_values={
            **MLA_REQUIRED,
            "mlp_bias": (False, "MLPs with biases are not supported"),
            "norm_topk_prob": (False, "transformers does not scale the experts' weights to a sum of 1 in this family"),
            "scoring_func": ("softmax", "experts must be chosen by a softmax"),
            "topk_method": ("greedy", "experts chosen within groups of a softmax are not supported"),
        },
        without_effect={
            "n_group": _UNUSED_GROUPS,
            "topk_group": _UNUSED_GROUPS,
            **MLA_WITHOUT_EFFECT,
        },
    ),
    defaults=_DEFAULTS,
    fixed=_own_keys,
    rope=MLA_ROPE,
    moe=softmax_moe_spec,
)

FAMILY = latent_family(_TABLE, _DEFAULTS)
