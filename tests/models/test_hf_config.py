"""config.json -> ArchSpec, against transformers' own configs and models."""

import dataclasses
import json

import pytest
import transformers
from safetensors.torch import load_file

from mrl.checkpoint.formats.hf import stored_shapes
from mrl.config import registry
from mrl.errors import UserError
from mrl.models._keys import refuse_foreign_structure
from mrl.models.base import RopeScaling
from mrl.models.hf_config import arch_from_config, arch_from_folder, families, family_of
from mrl.models.presets import PRESETS, arch_from_preset
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_names import written_together

TINY = [name for name in PRESETS if name.endswith("_tiny")]


def transformers_model(arch):
    config = family_of(arch).arch_to_hf(arch)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))


def test_every_family_has_a_tiny_preset_of_its_name():
    assert set(TINY) == {f"{name}_tiny" for name in families()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_structure_survives_config_json(preset):
    arch = arch_from_preset(preset, {}, None)
    assert arch_from_config(json.loads(json.dumps(family_of(arch).arch_to_hf(arch)))) == arch


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("tied", [True, False])
def test_the_table_names_exactly_the_tensors_that_transformers_saves(preset, tied, tmp_path):
    arch = arch_from_preset(preset, {"tie_word_embeddings": tied}, 101)
    transformers_model(arch).save_pretrained(tmp_path)
    theirs = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    ours = stored_shapes(hf_layout(arch, "float32"), written_together(arch))
    assert {name: shape for name, (shape, _) in ours.items()} == theirs


@pytest.mark.parametrize("preset", TINY)
def test_a_config_that_transformers_saved_gives_the_structure_back(preset, tmp_path):
    arch = arch_from_preset(preset, {}, None)
    transformers_model(arch).config.save_pretrained(tmp_path)
    assert arch_from_folder(tmp_path) == arch


def test_both_spellings_of_rotary_settings_are_read():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    base = {key: value for key, value in PRESETS["llama_tiny"].items() if not key.startswith("rope_")}
    old = arch_from_config({**base, "rope_theta": 5e5, "rope_scaling": scaling})
    new = arch_from_config({**base, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling("llama3", 8.0, 64, 1.0, 4.0))


def test_the_written_config_has_both_spellings_of_rotary_settings():
    arch = arch_from_preset("llama_tiny", {}, None)
    written = family_of(arch).arch_to_hf(arch)
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert arch_from_config(old) == arch_from_config(new) == arch


def test_head_dim_is_the_quotient_where_the_file_has_none():
    assert arch_from_config(dict(PRESETS["llama_tiny"])).head_dim == 64 // 4


REFUSED = {
    "unknown family": ({"model_type": "gpt2"}, "model_type is 'gpt2'; mrl supports "),
    "no family": ({"model_type": None}, "model_type is None"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "attention bias": ({"attention_bias": True}, "attention_bias is True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "layer types of another number of layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "layer types that transformers ignores": ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "an attention that mrl lacks": (
        {"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4},
        "layer_types",
    ),
    "sliding layers without a window": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
        "use_sliding_window=true",
    ),
    "a window as text": ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window is '8'"),
    "windows of unnamed layers": (
        {**PRESETS["qwen2_moe_tiny"], "use_sliding_window": True, "sliding_window": 8},
        "layer_types",
    ),
    "proportional": ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_type is 'proportional'"),
    "half rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rotary settings no mapping": ({"rope_parameters": "llama3"}, "rope_parameters is 'llama3'"),
    "llama3 without a factor": ({"rope_parameters": {"rope_type": "llama3"}}, "'factor' is missing"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "layers as text": ({"num_hidden_layers": "24"}, "num_hidden_layers is '24'"),
    "heads and groups": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads (3)"),
    "heads and hidden": ({"num_attention_heads": 6}, "hidden_size (64) is not a multiple"),
    "odd head_dim": ({"head_dim": 15}, "head_dim is 15"),
    "eps as text": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    "tied as text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_a_structure_that_mrl_does_not_build_is_refused(change, message):
    with pytest.raises(UserError) as refusal:
        arch_from_config({**PRESETS["llama_tiny"], "rope_scaling": None, **change})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_named(key):
    config = {name: value for name, value in PRESETS["qwen2_tiny"].items() if name != key}
    with pytest.raises(UserError, match=f"'{key}' is missing"):
        arch_from_config(config)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("num_hidden_layers", "num_hiden_layers"),
        ("num_hidden_layers", "num_hidden_layer"),
        ("hidden_size", "hiddensize"),
        ("intermediate_size", "intermedate_size"),
    ],
)
def test_a_missing_key_is_named_with_the_similar_key_of_the_file(key, given):
    config = {given if name == key else name: value for name, value in PRESETS["llama_tiny"].items()}
    with pytest.raises(UserError, match=f"'{key}' is missing.*'{given}'"):
        arch_from_config(config)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("preset", ["llama_tiny", "qwen3_moe_tiny"])
def test_a_valid_key_is_not_taken_for_a_misspelled_one(key, preset):
    with pytest.raises(UserError) as caught:
        arch_from_config({name: value for name, value in PRESETS[preset].items() if name != key})
    assert str(caught.value) == f"config.json: '{key}' is missing."


USED = {"use_sliding_window": True}
WINDOWS = {
    "no layer": ("qwen2_tiny", {**USED, "max_window_layers": 4, "sliding_window": 8}, ()),
    "not used": ("qwen2_tiny", {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8}, ()),
    "last layers": ("qwen2_tiny", {**USED, "max_window_layers": 3, "sliding_window": 8}, (3,)),
    "28 layers by default": ("qwen3_tiny", {**USED, "sliding_window": 8, "num_hidden_layers": 30}, (28, 29)),
    "as long as the model": ("mistral_tiny", {"sliding_window": 512}, ()),
    "all layers": ("mistral_tiny", {"sliding_window": 511}, (0, 1, 2, 3)),
    "none": ("mistral_tiny", {"sliding_window": None}, ()),
    "experts": ("mixtral_tiny", {"sliding_window": 8}, (0, 1, 2, 3)),
    "all layers if used": ("qwen3_moe_tiny", {**USED, "sliding_window": 8, "max_window_layers": 2}, (0, 1, 2, 3)),
    "phi3": ("phi3_tiny", {"sliding_window": 8}, (0, 1, 2, 3)),
    "named": (
        "qwen2_moe_tiny",
        {**USED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        (0, 2),
    ),
}


@pytest.mark.parametrize("preset, changes, layers", WINDOWS.values(), ids=WINDOWS)
def test_layers_with_a_window_are_those_of_transformers_and_survive_config_json(preset, changes, layers):
    arch = arch_from_config({**PRESETS[preset], **changes})
    assert arch.windowed_layers == layers
    assert arch.sliding_window == (changes["sliding_window"] if layers else None)
    assert arch_from_config(json.loads(json.dumps(family_of(arch).arch_to_hf(arch)))) == arch


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("[]", "expected an object"),
        ('{"model_type": "mamba"}', "model_type is 'mamba'"),
    ],
)
def test_a_broken_folder_is_refused_by_name(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        arch_from_folder(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        arch_from_folder(tmp_path / "nowhere")


def test_every_field_of_the_structure_is_written():
    """A field that config.json forgets would come back as its default."""
    arch = arch_from_preset("llama_tiny", {}, None)
    changed = dataclasses.replace(
        arch,
        num_layers=3,
        hidden_size=96,
        intermediate_size=80,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        vocab_size=77,
        max_position_embeddings=99,
        rms_norm_eps=0.5,
        rope_theta=7.0,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling("llama3", 2.0, 11, 3.0, 5.0),
    )
    assert arch_from_config(family_of(arch).arch_to_hf(changed)) == changed


def test_a_key_of_a_family_that_transformers_lacks_is_named(monkeypatch):
    keys = registry.find("models", "qwen2", "FAMILY").keys
    with pytest.raises(UserError, match="odd_key: neither mrl nor the installed transformers knows"):
        refuse_foreign_structure({"model_type": "not_in_transformers", "odd_key": 3}, keys)


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


def test_the_published_config_of_gpt_oss_is_its_preset():
    assert arch_from_config(GPT_OSS_20B) == arch_from_preset("gpt_oss_20b", {}, None)


@pytest.mark.parametrize(
    "change", [{"swiglu_limit": 6.0}, {"swiglu_alpha": 1.0}, {"attention_bias": False}, {"rope_scaling": None}], ids=str
)
def test_another_gpt_oss_is_refused_by_key(change):
    with pytest.raises(UserError, match=next(iter(change))):
        arch_from_config({**GPT_OSS_20B, **change})
