"""Rotary settings of config.json: those of public models are read, wrong ones are refused by key, all are written."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from mrl.errors import UserError
from mrl.models._positions import attention_factor, engine_rope, for_run, notes, position_limit, resized
from mrl.models.base import RopeScaling
from mrl.models.hf_config import arch_from_config, family_of
from mrl.models.kernels.rope_frequencies import rotary_frequencies
from mrl.models.presets import PRESETS
from tests.models.rope import both_spellings, variants

SHORT, LONG = [1.0 + 0.01 * index for index in range(48)], [1.0 + 1.1 * index for index in range(48)]
SIZES = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
PUBLIC = {
    "Qwen2.5-7B-Instruct with yarn": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rope_theta": 1e6,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        (RopeScaling("yarn", 4.0, 32768), 128, 131072, 0.1 * 1.3862943611198906 + 1),
    ),
    "Phi-3.5-mini": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "attention_bias": False,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"},
        },
        (
            RopeScaling("longrope", None, 4096, short_factor=tuple(SHORT), long_factor=tuple(LONG)),
            *(96, 131072, 1.1902380714238083),
        ),
    ),
    "Phi-4-mini": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "partial_rotary_factor": 0.75,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "rope_scaling": {"long_factor": LONG, "short_factor": [1.0] * 48, "type": "longrope"},
        },
        (
            RopeScaling("longrope", None, 4096, short_factor=(1.0,) * 48, long_factor=tuple(LONG)),
            *(96, 131072, 1.1902380714238083),
        ),
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "attention_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
            },
        },
        (RopeScaling("llama3", 8.0, 8192, 1.0, 4.0), 128, 131072, 1.0),
    ),
    "Yarn-Llama-2-7b-64k": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "rope_scaling": {
                "factor": 16.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
                "finetuned": True,
            },
        },
        (RopeScaling("yarn", 16.0, 4096), 128, 65536, 0.1 * 2.772588722239781 + 1),
    ),
    "vicuna-7b-v1.5-16k": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
        },
        (RopeScaling("linear", 4.0), 128, 16384, 1.0),
    ),
}


@pytest.mark.parametrize(("config", "expected"), PUBLIC.values(), ids=PUBLIC)
def test_configs_of_public_models_are_read(config, expected):
    config = {**SIZES, **config}
    arch = arch_from_config(config)
    assert (arch.rope_scaling, arch.rotary_dim, position_limit(arch)) == expected[:3]
    assert attention_factor(arch) == pytest.approx(expected[3], rel=1e-9)
    arch = for_run(arch, 10_000)
    theirs = transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "auto_map"})
    found = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[arch.rope_scaling.rope_type](theirs, "cpu", 10_000)
    assert rotary_frequencies(arch)[0].equal(found[0]) and attention_factor(arch) == pytest.approx(found[1])


VARIANTS = variants()
NEW_SPELLING = "rope_parameters" in transformers.LlamaConfig().to_dict()
"""Whether the installed transformers reads `rope_parameters`."""


def by_transformers(config):
    """Frequencies and attention factor of the longest sequences."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).model
    longest = config["max_position_embeddings"]
    model.rotary_emb(torch.zeros(1, longest, 1), torch.arange(longest)[None])  # longrope changes its list here
    return model.rotary_emb.inv_freq, model.rotary_emb.attention_scaling


@pytest.mark.parametrize(("family", "keys"), VARIANTS.values(), ids=VARIANTS)
def test_what_is_written_is_the_same_model_for_mrl_and_for_transformers(family, keys, tmp_path):
    sizes = {key: value for key, value in PRESETS[f"{family}_tiny"].items() if not key.startswith("rope_")}
    config = {**sizes, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": None, **keys}
    arch = arch_from_config(config)
    written = json.loads(json.dumps(family_of(arch).arch_to_hf(for_run(arch, 20))))
    assert arch_from_config(written) == arch
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert arch_from_config(old) == arch_from_config(new) == arch
    spellings = (old, new) if NEW_SPELLING else (old,)
    expected, factor = by_transformers(config)
    for each in (written, *spellings):
        frequencies, own = by_transformers(each)
        assert frequencies.equal(expected) and own == factor
    transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert arch_from_config(json.loads((tmp_path / "config.json").read_text())) == arch


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}
REFUSED = {
    "no factor": ({"rope_type": "linear"}, "'factor' is missing"),
    "factor as text": ({**YARN, "factor": "4"}, "factor is '4'"),
    "negative factor": ({"rope_type": "dynamic", "factor": -1.0}, "factor is -1.0"),
    "original length 0": ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
    "attention factor": ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
    "attention factor as text": ({**LONGROPE, "attention_factor": "1"}, "attention_factor is '1'"),
    "betas": ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast=1.0"),
    "beta as text": ({**YARN, "beta_slow": "x"}, "beta_slow is 'x'"),
    "negative mscale": ({**YARN, "mscale": -1.0}, "mscale is -1.0"),
    "truncate as number": ({**YARN, "truncate": 1}, "truncate is 1"),
    "theta 1": ({**YARN, "rope_theta": 1.0}, "rope_theta is 1.0"),
    "no lists": ({"rope_type": "longrope", "factor": 4.0}, "'short_factor' is missing"),
    "a factor that versions read differently": ({**LONGROPE, "factor": 4.0}, "factor is 4.0"),
    "short list": ({**LONGROPE, "long_factor": [1.0] * 7}, "long_factor in rope_parameters has 7 numbers"),
    "a list of text": ({**LONGROPE, "short_factor": ["a"] * 8}, "short_factor is 'a'"),
    "a list with 0": ({**LONGROPE, "short_factor": [0.0] * 8}, "short_factor is 0.0"),
    "a list that is none": ({**LONGROPE, "short_factor": {"0": 1.0}}, "short_factor is {"),
    "longrope of length 1": ({**LONGROPE, "original_max_position_embeddings": 1}, "needs at least 2"),
    "a key of another type": ({**YARN, "low_freq_factor": 1.0}, "'low_freq_factor'"),
    "unknown type": ({"rope_type": "ntk", "factor": 2.0}, "rope_type is 'ntk'"),
    "su": ({**LONGROPE, "rope_type": "su"}, "rope_type is 'su'"),
    "part of a head": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
}


@pytest.mark.parametrize(("rope", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_settings_are_refused_by_key(rope, message):
    config = {key: value for key, value in PRESETS["llama_tiny"].items() if not key.startswith("rope_")}
    with pytest.raises(UserError) as refusal:
        arch_from_config({**config, "rope_parameters": {"rope_theta": 50.0, **rope}})
    assert message in str(refusal.value) and "config.json" in str(refusal.value)


PHI = {key: value for key, value in PRESETS["phi3_tiny"].items() if not key.startswith("rope_")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rotary_factor": 0.8}, "rotates 12"),
        ({"partial_rotary_factor": 0.7}, "rotates 11"),
        ({"partial_rotary_factor": 1.5}, "rotates 24"),
        ({"partial_rotary_factor": 0.01}, "rotates 0"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
            "partial_rotary_factor is 0.5",
        ),
        ({"rope_scaling": YARN}, "'original_max_position_embeddings'"),  # an old name of longrope
        ({"rope_scaling": {**LONGROPE}}, "original_max_position_embeddings is 4096, and 16"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
    ],
    ids=str,
)
def test_wrong_settings_of_phi_3_are_refused_by_key(change, message):
    if message == "rotates 12":  # which is even
        assert arch_from_config({**PHI, **change}).rotary_dim == 12
        return
    with pytest.raises(UserError) as refusal:
        arch_from_config({**PHI, **change})
    assert message in str(refusal.value) or "short_factor" in str(refusal.value)


def test_a_run_chooses_one_list_for_all_its_positions_and_says_so():
    arch = arch_from_config({**PHI, "original_max_position_embeddings": 16, "rope_scaling": {**LONGROPE}})
    short, long = for_run(arch, 16), for_run(arch, 17)
    assert (short.rope_scaling.uses_long_factor, long.rope_scaling.uses_long_factor) == (False, True)
    assert not rotary_frequencies(short)[0].equal(rotary_frequencies(long)[0])
    assert "short_factor" in notes(short, 16)[0] and "long_factor" in notes(long, 17)[0]
    other = arch_from_config(PRESETS["llama_tiny"])
    assert for_run(other, 17) == other and notes(other, 17) == []


def test_an_engine_gets_the_list_and_the_factor_of_the_run():
    settings = {**LONGROPE, "attention_factor": 1.5}
    base = {**PHI, "original_max_position_embeddings": 16, "max_position_embeddings": 64}
    for longest, chosen in ((16, 1.0), (17, 2.0)):
        arch = for_run(arch_from_config({**base, "rope_scaling": settings}), longest)
        keys = engine_rope(arch)
        for spelling in ("rope_parameters", "rope_scaling"):
            assert keys[spelling]["short_factor"] == keys[spelling]["long_factor"] == [chosen] * 8
            assert keys[spelling]["short_mscale"] == keys[spelling]["long_mscale"] == 1.5
        if NEW_SPELLING:  # transformers 4 refuses an attention factor of Phi 3
            config = transformers.AutoConfig.for_model(**{**family_of(arch).arch_to_hf(arch), **keys})
            assert config.rope_parameters["rope_type"] == "longrope"
    plain = engine_rope(for_run(arch_from_config({**base, "rope_scaling": {**LONGROPE}}), 17))
    assert set(plain["rope_scaling"]) == {"type", "short_factor", "long_factor"}  # all that transformers 4 accepts


def test_an_engine_computes_dynamic_positions_as_unscaled_ones():
    config = {**PRESETS["llama_tiny"], "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    keys = engine_rope(arch_from_config(config))
    assert (keys["rope_parameters"]["rope_type"], keys["rope_scaling"]) == ("default", None)
    assert engine_rope(arch_from_config({**config, "rope_scaling": YARN})) == {}
    longer = {**YARN, "original_max_position_embeddings": 512}
    assert engine_rope(arch_from_config({**config, "rope_scaling": longer})) == {"max_position_embeddings": 2048}


@pytest.mark.parametrize("head_dim", [8, 32])
def test_a_smaller_model_has_settings_that_fit_its_heads(head_dim):
    rope = {**LONGROPE, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "partial_rotary_factor": 0.75}
    base = {**PHI, "original_max_position_embeddings": 16, **both_spellings({"rope_theta": 9.0, **rope})}
    arch = arch_from_config({**base, "partial_rotary_factor": 0.75})
    small = resized(arch, head_dim)
    assert small.rotary_dim == head_dim * 3 // 4
    assert arch_from_config(family_of(small).arch_to_hf(small)) == small
    assert resized(replace(arch, rope_scaling=None, partial_rotary_factor=1.0), head_dim).rotary_dim == head_dim
