"""config.json of a TensorRT-LLM checkpoint: what is written, what is read, and what is refused."""

import json

import pytest

from mrl.checkpoint.formats.trtllm_config import TrtllmConfig, from_json, read_config, to_json
from mrl.errors import UserError
from mrl.models.hf_config import families
from mrl.models.presets import PRESETS, arch_from_preset
from mrl.resharding.trtllm import TrtllmMapping
from tests.checkpoint.formats import trtllm_oracle as oracle

WRITTEN = sorted(
    name
    for name, config in PRESETS.items()
    if name != "phi4_mini" and families()[config["model_type"]].trtllm_architecture is not None
)
"""All but those of families and with positions that TensorRT-LLM lacks."""


def config_of(preset, mapping=None, **options):
    return TrtllmConfig(arch_from_preset(preset, {}, None), mapping or TrtllmMapping(), "bfloat16", **options)


@pytest.mark.parametrize("preset", WRITTEN)
@pytest.mark.parametrize("fp8", [False, True])
def test_every_preset_survives_the_way_there_and_back(preset, fp8):
    config = config_of(preset, TrtllmMapping(2, 2, use_parallel_embedding=True), fp8=fp8, gpus_per_node=4)
    text = json.dumps(to_json(config))
    oracle.check_config(json.loads(text))
    assert from_json(json.loads(text)) == config


def test_llama3_scaling_is_what_nvidia_reads():
    written = to_json(config_of("llama3.1_8b"))
    assert written["rotary_base"] == 500000.0
    assert written["rotary_scaling"] == {
        "type": "llama3",
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def scaled(rope, preset="llama_tiny", **more):
    return TrtllmConfig(arch_from_preset(preset, {"rope_scaling": rope, **more}, None), TrtllmMapping(), "bfloat16")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    ],
    ids=str,
)
def test_scalings_that_nvidia_reads_survive_the_way_there_and_back(rope):
    written = to_json(scaled(rope))
    assert written["rotary_scaling"] == {"type": rope["rope_type"], **rope}
    oracle.check_config(json.loads(json.dumps(written)))
    assert from_json(json.loads(json.dumps(written))) == scaled(rope)


@pytest.mark.parametrize(
    ("rope", "more", "key"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, {}, "'dynamic'"),
        (LONGROPE, {}, "'longrope'"),
        ({**YARN, "attention_factor": 0.7}, {}, "attention_factor"),
        ({**YARN, "truncate": False}, {}, "truncate"),
        ({**YARN, "mscale": 0.7}, {}, "mscale"),
        (None, {"preset": "phi3_tiny", "partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
    ],
    ids=str,
)
def test_positions_that_nvidia_computes_otherwise_are_refused_by_key(rope, more, key):
    with pytest.raises(UserError, match=key):
        scaled(rope, **more)


def test_probabilities_are_renormalised_where_the_model_does():
    modes = {preset: to_json(config_of(preset))["moe"]["normalization_mode"] for preset in WRITTEN}
    assert (modes["qwen3_30b_a3b"], modes["mixtral_tiny"], modes["qwen2_moe_tiny"]) == (1, 1, 0)


def test_the_sizes_of_experts_and_shared_expert():
    written = to_json(config_of("qwen2_moe_tiny"))
    moe = arch_from_preset("qwen2_moe_tiny", {}, None).moe
    assert written["moe_intermediate_size"] == moe.intermediate_size
    assert written["moe_shared_expert_intermediate_size"] == moe.shared_intermediate_size
    assert (written["moe"]["num_experts"], written["moe"]["top_k"]) == (moe.num_experts, moe.top_k)


def test_fp8_leaves_out_what_tensorrt_llm_leaves_out():
    quantization = to_json(config_of("qwen2_tiny", fp8=True))["quantization"]
    assert quantization["quant_algo"] == "FP8"
    assert {"*lm_head", "*router", "*vocab_embedding", "*shared_expert_gate"} <= set(quantization["exclude_modules"])


def test_defaults_of_tensorrt_llm_stand_for_keys_that_are_left_out():
    config = to_json(config_of("llama_tiny"))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    for key in ("head_size", "num_key_value_heads", "norm_epsilon", "rotary_base", "mapping", "quantization", "moe"):
        del config[key]
    arch = from_json(config).arch
    assert (arch.head_dim, arch.num_kv_heads, arch.rms_norm_eps) == (hidden // heads, heads, 1e-5)
    assert (arch.rope_theta, arch.moe, from_json(config).mapping) == (10000.0, None, TrtllmMapping())


REFUSED = {
    "another architecture": ("llama_tiny", {"architecture": "GemmaForCausalLM"}, "architecture is 'GemmaForCausalLM'"),
    "biases in llama": ("llama_tiny", {"attn_bias": True}, "attn_bias is True"),
    "a bias in the MLP": ("qwen2_tiny", {"mlp_bias": True}, "mlp_bias is True"),
    "no q/k norm in qwen3": ("qwen3_tiny", {"qk_layernorm": False}, "qk_layernorm is False"),
    "part of the head rotated": ("llama_tiny", {"rotary_embedding_dim": 2}, "rotary_embedding_dim is 2"),
    "other positions": ("llama_tiny", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
    "another activation": ("llama_tiny", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "logn attention": ("qwen2_tiny", {"use_logn_attn": True}, "use_logn_attn is True"),
    "a residual MLP": ("llama_tiny", {"residual_mlp": True}, "residual_mlp is True"),
    "experts in llama": ("llama_tiny", {"hidden_act": "swiglu"}, "hidden_act is 'swiglu'"),
    "another scaling": ("llama_tiny", {"rotary_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "mixtral without renormalisation": (
        "mixtral_tiny",
        {"moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 0}},
        "moe is",
    ),
    "context parallelism": ("llama_tiny", {"mapping": {"cp_size": 2, "world_size": 2}}, "cp_size is 2"),
    "another world": ("llama_tiny", {"mapping": {"tp_size": 2, "world_size": 4}}, "world_size is 4"),
    "sizes of experts": ("mixtral_tiny", {"mapping": {"tp_size": 4, "moe_ep_size": 3}}, "is not tp_size=4"),
    "a size that is text": ("llama_tiny", {"mapping": {"tp_size": "2"}}, "tp_size is '2'"),
    "a mapping that is a list": ("llama_tiny", {"mapping": [1]}, "mapping is"),
    "moe that is a list": ("llama_tiny", {"moe": [1]}, "moe is"),
    "int4 weights": ("llama_tiny", {"quantization": {"quant_algo": "W4A16"}}, "quant_algo is 'W4A16'"),
    "an fp8 cache": ("llama_tiny", {"quantization": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo 'FP8'"),
    "other exclusions": (
        "llama_tiny",
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["*mlp*"]}},
        "exclude_modules is",
    ),
    "another dtype": ("llama_tiny", {"dtype": "float8"}, "dtype is 'float8'"),
    "a hidden size that is text": ("llama_tiny", {"hidden_size": "64"}, "hidden_size is '64'"),
    "too many stages": ("llama_tiny", {"mapping": {"pp_size": 99}}, "pp_size=99 leaves stages"),
}


@pytest.mark.parametrize(("preset", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_mrl_does_not_build_is_refused_with_the_file_and_the_key(tmp_path, preset, given, message):
    (tmp_path / "config.json").write_text(json.dumps(to_json(config_of(preset)) | given))
    with pytest.raises(UserError, match=message) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("key", ["architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_required_key_that_is_missing_is_named(key):
    config = to_json(config_of("llama_tiny"))
    del config[key]
    with pytest.raises(UserError, match=f"'{key}' is missing"):
        from_json(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("[]", "is a JSON list"),
        ('{"pretrained_config": {}}', "engine"),
    ],
)
def test_a_file_that_is_no_config_of_a_checkpoint_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


ODD_VALUES = (None, -1, 0, 3, 2.5, float("nan"), "", "text", True, [], [1], {}, {"a": 1}, 10**30)


def test_any_value_of_any_key_is_read_or_refused_as_a_mistake():
    refused = read = 0
    for preset in ("qwen3_moe_tiny", "llama_tiny"):
        whole = to_json(config_of(preset, fp8=True))
        inner = [(key, name) for key in ("mapping", "moe", "quantization", "mrl") for name in whole[key]]
        for path in [(key,) for key in whole] + inner:
            for value in ODD_VALUES:
                config = json.loads(json.dumps(whole))
                (config if len(path) == 1 else config[path[0]])[path[-1]] = value
                try:
                    from_json(config)
                    read += 1
                except UserError:
                    refused += 1
    assert refused > 300 and read > 100
