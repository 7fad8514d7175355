"""config.json files of public models are read as what they are, or refused by name.

Fields and numbers of parameters are those of the models' pages on the Hugging Face hub.
"""

import json

import pytest

from mrl.commands.plan.memory import num_parameters
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_config, family_of
from mrl.models.presets import arch_from_preset
from tests.models.test_presets import prediction_layer


def sizes(hidden, intermediate, layers, heads, kv_heads, vocab, positions, theta):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
PHI3 = {
    "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 32000,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "pad_token_id": 151329,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

READ = {
    # parameters, sliding window
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {**QWEN3_NEXT, **sizes(2048, 5120, 48, 16, 2, 151936, 262144, 10000000)},
        81_324_862_720,
        None,
    ),
    "mistralai/Mistral-7B-v0.1": (
        {**MISTRAL, **sizes(4096, 14336, 32, 32, 8, 32000, 32768, 10000.0), "sliding_window": 4096},
        7_241_732_096,
        4096,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {**MISTRAL, **sizes(4096, 14336, 32, 32, 8, 32768, 32768, 1e6), "sliding_window": None},
        7_248_023_552,
        None,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        {
            **MISTRAL,
            **sizes(4096, 14336, 32, 32, 8, 32000, 32768, 1e6),
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        46_702_792_704,
        None,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        {**PHI3, **sizes(3072, 8192, 32, 32, 32, 32064, 4096, 10000.0), "rope_scaling": None, "sliding_window": 2047},
        3_821_079_552,
        2047,
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        {
            **PHI3,
            **sizes(3072, 8192, 32, 32, 32, 32064, 131072, 10000.0),
            "rope_scaling": LONG,
            "sliding_window": 262144,
        },
        3_821_079_552,
        None,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        {
            **sizes(3584, 18944, 28, 28, 4, 152064, 32768, 1e6),
            "model_type": "qwen2",
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
        None,
    ),
    "Qwen/Qwen3-30B-A3B": (
        {
            **sizes(2048, 6144, 48, 32, 4, 151936, 40960, 1e6),
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        30_532_122_624,
        None,
    ),
    "zai-org/GLM-4.5-Air": (
        {
            **GLM,
            **sizes(4096, 10944, 46, 96, 8, 151552, 131072, 1000000),
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        110_468_824_832,
        None,
    ),
    "zai-org/GLM-4.5": (
        {
            **GLM,
            **sizes(5120, 12288, 92, 96, 8, 151552, 131072, 1000000),
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "use_qk_norm": True,
        },
        358_337_791_296,
        None,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_public_config_is_the_model_of_its_page(name):
    config, parameters, window = READ[name]
    arch = arch_from_config(dict(config))
    assert num_parameters(arch) + prediction_layer(arch) == parameters
    assert arch.sliding_window == window
    assert arch_from_config(json.loads(json.dumps(family_of(arch).arch_to_hf(arch)))) == arch


def test_positions_of_three_kinds_do_not_change_the_text_model_of_qwen3_5():
    """As the text part of a published Qwen3.5 names them, with the keys that transformers does not read."""
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    }
    given = {
        "model_type": "qwen3_5_moe_text",
        **sizes(2048, 512, 40, 16, 2, 248320, 262144, 1e7),
        "rope_parameters": rope,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    }
    assert arch_from_config(given) == arch_from_preset("qwen3.5_35b_a3b_text", {}, None)
    with pytest.raises(UserError, match="attn_output_gate is False"):
        arch_from_config({**given, "attn_output_gate": False})


@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "deepseek_v3", "kimi_k2", "qwen3_5", "qwen3_5_moe", "llama4_text", "gemma2"]
)
def test_a_model_that_mrl_lacks_is_refused_by_its_type(kind):
    with pytest.raises(UserError, match=f"model_type is '{kind}'; mrl supports "):
        arch_from_config({"model_type": kind, **sizes(64, 64, 2, 2, 2, 100, 512, 1e4)})
