"""Presets: named structures for models with random weights, as parts of a config.json.

The tiny ones are for tests and the quickstart; a family's file may define more in `PRESETS`. The others have the shapes
of public models, for rehearsals and benchmarks. A preset has no tokenizer and no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.config import registry
from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError
from mrl.models._keys import DECODER_KEYS
from mrl.models._quantization import QUANTIZED
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_config, families

INITIALIZER_RANGE = 0.02
"""Standard deviation of random weight matrices, transformers' default `initializer_range`."""

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

_TINY_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}

_TINY_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}

_TINY_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_LATENT: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_DEEPSEEK_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + index * index / 48 for index in range(48)],
}
"""Settings of the form of Phi-4-mini's; the long list is not the released one."""


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Returns the sizes of a decoder by their keys in config.json."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": _GPT_OSS_ROPE,
    "tie_word_embeddings": False,
}
_LARGE_QWEN2: dict[str, Any] = _QWEN2 | {"vocab_size": 152064, "tie_word_embeddings": False}
_QWEN2_MATH: dict[str, Any] = {"max_position_embeddings": 4096, "rope_theta": 10000.0}
_QWEN2_DISTILLED: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN15_MOE: dict[str, Any] = _QWEN2 | {
    "model_type": "qwen2_moe",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
}
_SMALL_LLAMA3: dict[str, Any] = _LLAMA3 | {
    "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}
_DEEPSEEK_LLM: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen2_tiny": {"model_type": "qwen2", **_TINY, "tie_word_embeddings": True},
    "llama_tiny": {
        "model_type": "llama",
        **_TINY,
        "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA3_ROPE, "original_max_position_embeddings": 64},
    },
    "qwen3_tiny": {"model_type": "qwen3", **_TINY, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe_tiny": {
        "model_type": "qwen3_moe",
        **_TINY,
        **_TINY_EXPERTS,
        "head_dim": 32,
        "num_experts": 4,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen2_moe_tiny": {
        "model_type": "qwen2_moe",
        **_TINY,
        **_TINY_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "mixtral_tiny": {
        "model_type": "mixtral",
        **_TINY,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "glm4_moe_tiny": {
        "model_type": "glm4_moe",
        **_TINY,
        **_TINY_EXPERTS,
        "n_routed_experts": 4,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "deepseek_v3_tiny": {
        "model_type": "deepseek_v3",
        **_TINY,
        **_TINY_MLA,
        **_TINY_EXPERTS,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": {**_DEEPSEEK_ROPE, "factor": 8.0, "original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
    },
    "deepseek_v2_tiny": {
        "model_type": "deepseek_v2",
        **_TINY,
        **_TINY_MLA,
        **_TINY_EXPERTS,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "qwen3_next_tiny": {
        "model_type": "qwen3_next",
        **_TINY,
        **_TINY_LINEAR,
        **_TINY_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 96,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text_tiny": {
        "model_type": "qwen3_5_text",
        **_TINY,
        **_TINY_LINEAR,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text_tiny": {
        "model_type": "qwen3_5_moe_text",
        **_TINY,
        **_TINY_LINEAR,
        **_TINY_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 96,
        "tie_word_embeddings": False,
    },
    "gemma3_text_tiny": {
        "model_type": "gemma3_text",
        **_TINY,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt_oss_tiny": {
        "model_type": "gpt_oss",
        **_TINY,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 64,
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {**_GPT_OSS_ROPE, "factor": 8.0, "original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
    },
    "mistral_tiny": {"model_type": "mistral", **_TINY, "sliding_window": None, "tie_word_embeddings": False},
    "phi3_tiny": {"model_type": "phi3", **_TINY, "tie_word_embeddings": False},
    "smollm2_135m": _SMOLLM2 | _sizes(576, 1536, 30, 9, 3),
    "smollm2_360m": _SMOLLM2 | _sizes(960, 2560, 32, 15, 5),
    "smollm2_1.7b": _SMOLLM2 | _sizes(2048, 8192, 24, 32, 32) | {"rope_theta": 130000.0},
    "deepseek_llm_7b": _DEEPSEEK_LLM | _sizes(4096, 11008, 30, 32, 32),
    "qwen1.5_moe_a2.7b": _QWEN15_MOE | _sizes(2048, 5632, 24, 16, 16),
    "qwen2_0.5b": _QWEN2 | _sizes(896, 4864, 24, 14, 2),
    "qwen2_1.5b": _QWEN2 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2_7b": _LARGE_QWEN2 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2_72b": _LARGE_QWEN2 | _sizes(8192, 29568, 80, 64, 8),
    "qwen2.5_0.5b": _QWEN2 | _sizes(896, 4864, 24, 14, 2),
    "qwen2.5_1.5b": _QWEN2 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2.5_3b": _QWEN2 | _sizes(2048, 11008, 36, 16, 2),
    "qwen2.5_7b": _LARGE_QWEN2 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2.5_14b": _LARGE_QWEN2 | _sizes(5120, 13824, 48, 40, 8),
    "qwen2.5_32b": _LARGE_QWEN2 | _sizes(5120, 27648, 64, 40, 8),
    "qwen2.5_72b": _LARGE_QWEN2 | _sizes(8192, 29568, 80, 64, 8),
    "qwen2.5_math_1.5b": _QWEN2 | _QWEN2_MATH | _sizes(1536, 8960, 28, 12, 2),
    "qwen2.5_math_7b": _LARGE_QWEN2 | _QWEN2_MATH | _sizes(3584, 18944, 28, 28, 4),
    "deepseek_r1_distill_qwen_1.5b": _QWEN2 | _QWEN2_DISTILLED | _sizes(1536, 8960, 28, 12, 2),
    "deepseek_r1_distill_qwen_7b": _LARGE_QWEN2 | _QWEN2_DISTILLED | _sizes(3584, 18944, 28, 28, 4),
    "qwen3_0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8),
    "qwen3_1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, 8),
    "qwen3_4b": _QWEN3 | _sizes(2560, 9728, 36, 32, 8),
    "qwen3_8b": _QWEN3 | _sizes(4096, 12288, 36, 32, 8) | {"tie_word_embeddings": False},
    "qwen3_14b": _QWEN3 | _sizes(5120, 17408, 40, 40, 8) | {"tie_word_embeddings": False},
    "qwen3_32b": _QWEN3 | _sizes(5120, 25600, 64, 64, 8) | {"tie_word_embeddings": False},
    "llama3.2_1b": _SMALL_LLAMA3 | _sizes(2048, 8192, 16, 32, 8) | {"head_dim": 64},
    "llama3.2_3b": _SMALL_LLAMA3 | _sizes(3072, 8192, 28, 24, 8) | {"head_dim": 128},
    "llama3.1_8b": _LLAMA3 | _sizes(4096, 14336, 32, 32, 8),
    "llama3.1_70b": _LLAMA3 | _sizes(8192, 28672, 80, 64, 8),
    "qwen3_30b_a3b": _QWEN3_MOE | _sizes(2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768},
    "qwen3_235b_a22b": _QWEN3_MOE | _sizes(4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536},
    "qwen2.5_7b_128k": _LARGE_QWEN2
    | _sizes(3584, 18944, 28, 28, 4)
    | {
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "phi4_mini": {
        "model_type": "phi3",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONGROPE,
        "tie_word_embeddings": True,
    },
    "gemma3_1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        **_sizes(1152, 6912, 26, 4, 1),
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "glm4.5_air_106b_a12b": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        **_sizes(2048, 10944, 27, 16, 16),
        **_LATENT,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {**_DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "moonlight_16b_a3b": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        **_sizes(2048, 11264, 27, 16, 16),
        **_LATENT,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v3_671b_a37b": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        **_sizes(7168, 18432, 61, 128, 128),
        **_LATENT,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": _DEEPSEEK_ROPE,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": False,
    },
    "kimi_k2_1t_a32b": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        **_sizes(7168, 18432, 61, 64, 64),
        **_LATENT,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": {**_DEEPSEEK_ROPE, "factor": 32.0, "beta_fast": 1.0},
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "qwen3_next_80b_a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        **_sizes(2048, 5120, 48, 16, 2),
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "qwen3.5_9b_text": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        **_sizes(4096, 12288, 32, 16, 4),
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "qwen3.5_35b_a3b_text": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        **_sizes(2048, 512, 40, 16, 2),
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    },
    "gpt_oss_20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt_oss_120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "glm4.5_355b_a32b": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": False,
    },
}


for _family in registry.names("models"):
    PRESETS |= registry.find("models", _family, "PRESETS", {})

_INITIALIZER = "initializer_range"


def arch_from_preset(name: str, overrides: Mapping[str, Any], vocab_size: int | None) -> ArchSpec:
    """Returns the structure of a preset.

    Args:
        name: Key of `PRESETS`.
        overrides: Keys of config.json that replace the preset's values.
        vocab_size: Vocabulary size of the tokenizer, used unless `overrides` sets one; None: the preset's own.

    Raises:
        UserError: Unknown preset or key (the nearest name is suggested), or inconsistent values.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise UserError(f"model.preset: there is no '{name}'.{hint} Known: {', '.join(PRESETS)}.")
    config = dict(PRESETS[name])
    read = families()[config["model_type"]].keys.read - {*DECODER_KEYS, *QUANTIZED}
    known = (*DECODER_KEYS, *sorted(read), _INITIALIZER)
    for key in overrides:
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(f"model.overrides: unknown key '{key}'.{hint} Known: {', '.join(known)}.")
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    try:
        initializer_range(overrides)
        arch = arch_from_config({**config, **{key: overrides[key] for key in overrides if key != _INITIALIZER}})
        if arch.sliding_window is None and overrides.get("sliding_window") is not None:
            raise UserError(
                f"sliding_window={overrides['sliding_window']} has no effect: no layer of this '{arch.family}' model "
                "has a window (use_sliding_window, max_window_layers, layer_types), or it is as long as the context."
            )
        return arch
    except UserError as error:
        raise UserError(f"model.preset={name} with model.overrides={dict(overrides)}: {error}") from error


def initializer_range(overrides: Mapping[str, Any]) -> float:
    """Returns the standard deviation of a preset's random weight matrices.

    Args:
        overrides: `model.overrides` of the config.

    Raises:
        UserError: The value is not a finite number above 0.
    """
    value = overrides.get(_INITIALIZER, INITIALIZER_RANGE)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{_INITIALIZER} is {value!r}, expected a number above 0.")
    return float(value)
