"""Every way to compute positions: vLLM, with the config.json that mrl writes, samples from transformers' model."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.engines.base import SamplingConfig
from mrl.models._positions import engine_rope, for_run
from mrl.models.hf_config import arch_from_folder, family_of
from tests.engines.native.tiny import SHAPE, make_checkpoint, make_prompts, refit
from tests.engines.vllm import tiny
from tests.engines.vllm.test_engine import assert_scored
from tests.models.rope import both_spellings, variants, with_one_list
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

HEAD_DIM, ORIGINAL, RESPONSE = 32, 16, 24
LENGTHS = (3, 16, 40)
SETTING = SamplingConfig(n=2, max_tokens=RESPONSE, seed=1)
LIMITS = {"long": {"prompt_length": 64, "response_length": 64}, "short": {"prompt_length": 8, "response_length": 8}}
VARIANTS = {
    name: {
        "model_type": family,
        **SHAPE,
        **tiny.SIZES,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **keys,
    }
    for name, (family, keys) in variants(HEAD_DIM, ORIGINAL).items()
}
# sequences are longer than max_position_embeddings, the original length
VARIANTS["linear_beyond"] = {**VARIANTS["linear"], "max_position_embeddings": 60}
VARIANTS["yarn_beyond"] = {
    **VARIANTS["yarn"],
    **both_spellings({**VARIANTS["yarn"]["rope_parameters"], "original_max_position_embeddings": 40}),
    "max_position_embeddings": 40,
}
CASES = [(name, "long") for name in VARIANTS] + [(name, "short") for name in ("longrope", "phi4_mini")]


def sampled(folder, limits, lengths, setting):
    """Rollouts of vLLM, which gets a config.json as a run writes it."""
    arch = for_run(arch_from_folder(folder), limits["prompt_length"] + limits["response_length"])
    config = json.loads((folder / "config.json").read_text())
    own = folder.with_name(folder.name + "_for_the_engine")
    shutil.copytree(folder, own)
    written = {**config, **family_of(arch).arch_to_hf(arch), **engine_rope(arch), "dtype": "float32"}
    (own / "config.json").write_text(json.dumps(written))
    with tiny.engine(own, arch=arch, **limits) as engine:
        refit(engine, folder, arch)
        return engine.generate(make_prompts(lengths), setting)


def reference(folder, name, *, uses_long):
    config = AutoConfig.for_model(**with_one_list(VARIANTS[name], uses_long=uses_long))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    return model.eval()


@pytest.mark.parametrize(("name", "limits"), CASES)
def test_log_probabilities_are_those_of_transformers(name, limits, tmp_path):
    folder = make_checkpoint(tmp_path / name, name, families=VARIANTS)
    lengths, setting = (LENGTHS, SETTING) if limits == "long" else ((1, 8), SamplingConfig(n=2, max_tokens=8, seed=1))
    (rollouts,) = run_ranks(1, sampled, folder, LIMITS[limits], lengths, setting)
    assert_scored(reference(folder, name, uses_long=limits == "long"), rollouts, setting)
