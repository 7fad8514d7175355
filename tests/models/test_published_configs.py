"""config.json files of public models are read as what they are, or refused by name.

Fields and numbers of parameters are those of the models' pages on the Hugging Face hub.
"""

import json

import pytest
import torch
import transformers

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
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "transformers_version": "4.33.1",
    "v_head_dim": 128,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SIGMOID = {
    **DEEPSEEK,
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
DEEPSEEK_V3 = {
    **SIGMOID,
    **sizes(7168, 18432, 61, 128, 128, 129280, 163840, 10000),
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": YARN,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
SOFTMAX = {**DEEPSEEK, "model_type": "deepseek_v2", "norm_topk_prob": False, "scoring_func": "softmax"}
LITE_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
DEEPSEEK_V2 = {
    **SOFTMAX,
    **sizes(5120, 12288, 60, 128, 128, 102400, 163840, 10000),
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": 1536,
    "rope_scaling": LITE_YARN,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
KIMI_K2 = {
    **SIGMOID,
    **sizes(7168, 18432, 61, 64, 64, 163840, 131072, 50000.0),
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
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
    "deepseek-ai/DeepSeek-V3": (DEEPSEEK_V3, 684_489_845_504, None),
    "deepseek-ai/DeepSeek-R1": (DEEPSEEK_V3, 684_489_845_504, None),
    "deepseek-ai/DeepSeek-V3.1": (
        {**DEEPSEEK_V3, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "transformers_version": "4.44.2"},
        684_489_845_504,
        None,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            **SOFTMAX,
            **sizes(2048, 10944, 27, 16, 16, 102400, 163840, 10000),
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "rope_scaling": LITE_YARN,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
        },
        15_706_484_224,
        None,
    ),
    "moonshotai/Moonlight-16B-A3B": (
        {
            **SIGMOID,
            **sizes(2048, 11264, 27, 16, 16, 163840, 8192, 50000.0),
            "rms_norm_eps": 1e-05,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rope_scaling": None,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
        },
        15_960_110_208,
        None,
    ),
    "moonshotai/Kimi-K2-Instruct": (KIMI_K2, 1_026_408_232_448, None),
}


@pytest.mark.parametrize("name", READ)
def test_a_public_config_is_the_model_of_its_page(name):
    config, parameters, window = READ[name]
    arch = arch_from_config(dict(config))
    has_more = config.get("num_nextn_predict_layers") or arch.family == "qwen3_next"
    extra = prediction_layer(arch) if has_more else 0
    assert num_parameters(arch) + extra == parameters
    assert arch.sliding_window == window
    assert arch_from_config(json.loads(json.dumps(family_of(arch).arch_to_hf(arch)))) == arch


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3_671b_a37b"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2_lite"),
        ("moonshotai/Moonlight-16B-A3B", "moonlight_16b_a3b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2_1t_a32b"),
    ],
)
def test_a_public_config_is_its_preset(name, preset):
    assert arch_from_config(dict(READ[name][0])) == arch_from_preset(preset, {}, None)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("deepseek-ai/DeepSeek-V3", (1536, 512, 128, 64, 128)),
        ("deepseek-ai/DeepSeek-V2-Lite", (None, 512, 128, 64, 128)),
        ("moonshotai/Kimi-K2-Instruct", (1536, 512, 128, 64, 128)),
    ],
)
def test_scores_of_latent_attention_have_the_factor_of_transformers(name, theirs):
    """Transformers scales by yarn's mscale_all_dim beyond the size of a head."""
    config = READ[name][0]
    arch = arch_from_config(dict(config))
    family = family_of(arch).hf_model_type
    small = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 8, "quantization_config": None}
    settings = transformers.AutoConfig.for_model(**{**config, **small, "model_type": family})
    with torch.device("meta"):
        attention = transformers.AutoModelForCausalLM.from_config(settings).model.layers[0].self_attn
    assert (arch.attention_scale or arch.head_dim**-0.5) == pytest.approx(attention.scaling, rel=1e-12)
    mla = arch.mla
    assert (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim) == theirs
    assert (arch.head_dim, arch.num_kv_heads, arch.rotary_dim, mla.cache_dim) == (192, arch.num_heads, 64, 576)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk_method", "group_limited_greedy"),
        ("norm_topk_prob", True),
        ("scoring_func", "sigmoid"),
        ("moe_layer_freq", 2),
        ("q_lora_rank", 0),
        ("kv_lora_rank", None),
        ("qk_nope_head_dim", "128"),
        ("qk_rope_head_dim", 63),
        ("v_head_dim", -1),
        ("qk_head_dim", 128),
        ("head_dim", 192),
        ("num_key_value_heads", 8),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("first_k_dense_replace", 27),
        ("partial_rotary_factor", 0.5),
        ("index_topk", 2048),
        ("vision_config", {"depth": 2}),
    ],
)
def test_a_wrong_value_of_a_latent_model_is_named(key, value):
    config = {**READ["deepseek-ai/DeepSeek-V2-Lite"][0], key: value}
    with pytest.raises(UserError, match=f"config.json: {key} is "):
        arch_from_config(config)


def test_experts_within_groups_of_a_softmax_are_refused():
    with pytest.raises(UserError, match="topk_method is 'group_limited_greedy'"):
        arch_from_config(dict(DEEPSEEK_V2))


def test_positions_of_three_kinds_do_not_change_the_text_model_of_qwen3_5():
    """The keys are those of the text part of a published Qwen3.5, some of which transformers does not read."""
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


REFUSED_TYPES = ["deepseek_v32", "glm4_moe_lite", "kimi_linear", "qwen3_5", "qwen3_5_moe", "llama4_text", "gemma2"]


@pytest.mark.parametrize("kind", REFUSED_TYPES)
def test_a_model_that_mrl_lacks_is_refused_by_its_type(kind):
    with pytest.raises(UserError, match=f"model_type is '{kind}'; mrl supports "):
        arch_from_config({"model_type": kind, **sizes(64, 64, 2, 2, 2, 100, 512, 1e4)})
