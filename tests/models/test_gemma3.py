"""Gemma 3: config.json of the released models is read as transformers reads it, and written for all its versions."""

import json

import pytest
import transformers

from mrl.errors import UserError
from mrl.models._positions import position_limit
from mrl.models.hf_config import arch_from_config, family_of
from mrl.models.presets import PRESETS, arch_from_preset

RELEASED = {
    "1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    },
    "text part of 4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "text part of 27b": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_read_and_written(name):
    config = RELEASED[name]
    arch = arch_from_config(config)
    theirs = transformers.AutoConfig.for_model(**config)
    windowed = tuple(layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
    sizes = (arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.sliding_window)
    assert sizes == (
        *(theirs.hidden_size, theirs.num_attention_heads, theirs.num_key_value_heads),
        *(theirs.head_dim, theirs.sliding_window),
    )
    assert arch.windowed_layers == windowed
    assert arch.vocab_size == theirs.vocab_size and arch.tie_word_embeddings == theirs.tie_word_embeddings
    assert (arch.rope_theta, arch.local_rope_theta) == (1e6, 1e4)
    assert (arch.attention_scale or arch.head_dim**-0.5) == theirs.query_pre_attn_scalar**-0.5
    assert position_limit(arch) == theirs.max_position_embeddings  # linear scaling does not extend it further
    written = json.loads(json.dumps(family_of(arch).arch_to_hf(arch)))
    assert arch_from_config(written) == arch
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert arch_from_config(old) == arch_from_config(new) == arch


def test_the_preset_is_the_released_model():
    assert arch_from_preset("gemma3_1b", {}, None) == arch_from_config(RELEASED["1b"])


SCALED = {"rope_type": "linear", "factor": 8.0}
REFUSED = {
    "vision": ({"model_type": "gemma3", "text_config": {}}, "vision tower"),
    "one rotary setting for all layers": ({"rope_parameters": {"rope_type": "default"}}, "full_attention"),
    "a type by its old name": ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "'rope_type'"),
    "scaled windowed layers": ({"rope_parameters": {"sliding_attention": SCALED}}, "rope_local_base_freq"),
    "two bases of windowed layers": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
        "rope_local_base_freq",
    ),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    "windowed layers without a window": ({"sliding_window": None}, "sliding_window is null"),
    "capped scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "capped logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "later tokens": ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    "a bias": ({"attention_bias": True}, "attention_bias is True"),
    "activation": ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    "no scale": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_mrl_does_not_build_is_refused_by_key(change, message):
    with pytest.raises(UserError) as refusal:
        arch_from_config({**PRESETS["gemma3_text_tiny"], **change})
    assert message in str(refusal.value)
