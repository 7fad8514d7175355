"""The small part of `tests/models/folder_fuzz.py` that the suite runs."""

import json

import pytest

from mrl.checkpoint.formats.hf import INDEX
from tests.models import folder_fuzz

NUM_FOLDERS = 40


@pytest.fixture(scope="module", autouse=True)
def _warm():
    folder_fuzz.warm_up()


@pytest.mark.slow
def test_a_broken_model_folder_is_read_or_refused_in_one_message():
    ends = {number: folder_fuzz.outcome(folder_fuzz.damaged(number)) for number in range(NUM_FOLDERS)}
    assert {number: end for number, end in ends.items() if end[0] not in ("read", "refused")} == {}
    assert sum(how == "refused" for how, _ in ends.values()) > NUM_FOLDERS // 2


LONG = "x" * 5000
FOUND = {
    "a rotary type that is not equal to itself": ("config.json", ["rope_scaling"], {"rope_type": float("nan")}),
    "a part with a long name": (INDEX, ["weight_map", "model.norm.weight"], "a" * 300),
    "a part with a number for a name": (INDEX, ["weight_map", "model.norm.weight"], 10**400),
    "a tensor with a long name": (INDEX, ["weight_map", LONG], "model-00001-of-00002.safetensors"),
    "a model type that is a list": ("config.json", ["model_type"], ["llama"]),
    "a theta that no float holds": ("config.json", ["rope_theta"], 10**400),
    "end tokens that are none": ("generation_config.json", ["eos_token_id"], [LONG]),
    "an end token that is a flag": ("config.json", ["eos_token_id"], True),
}
"""Damage that ended otherwise -> file, key in it, value."""


@pytest.mark.parametrize("name, place, value", FOUND.values(), ids=FOUND)
def test_what_the_campaign_found_is_refused(name, place, value):
    files = dict(folder_fuzz.originals("llama_tiny"))
    content = json.loads(files.get(name, b"{}"))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    files[name] = json.dumps(content).encode()
    how, said = folder_fuzz.outcome(files)
    assert how == "refused", said


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "vocab_size", "rope_theta", "rms_norm_eps"])
def test_an_absurd_value_is_refused_before_anything_is_made_of_it(key):
    files = dict(folder_fuzz.originals("qwen2_moe_tiny"))
    good = json.loads(files["config.json"])
    for name in ("rope_parameters", "rope_scaling"):
        del good[name]
    for value in (10**400, float("inf"), float("nan"), -1, "\ud800", *([10**9] if key[0] in "nv" else [])):
        files["config.json"] = json.dumps({**good, key: value}).encode()
        how, said = folder_fuzz.outcome(files)
        assert how == "refused", (value, said)
