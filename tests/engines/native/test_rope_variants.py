"""Every way to compute positions in the engine: tokens and log-probabilities are transformers'."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.engines.base import SamplingConfig
from mrl.models._positions import for_run
from mrl.models.hf_config import arch_from_folder
from tests.engines.native.test_engine import LOGPROB_ATOL, score
from tests.engines.native.tiny import SHAPE, make_checkpoint, make_engine, make_prompts
from tests.models.rope import variants, with_one_list

HEAD_DIM, ORIGINAL, RESPONSE = 16, 16, 24
LENGTHS = (1, 9, 16, 40)
"""Prompts and responses below and above the original length."""
VARIANTS = {
    name: {
        "model_type": family,
        **SHAPE,
        "hidden_size": 64,
        "head_dim": HEAD_DIM,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **keys,
    }
    for name, (family, keys) in variants(HEAD_DIM, ORIGINAL).items()
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name, families=VARIANTS)
        return made[name]

    return folder


def reference(folder, name, *, uses_long):
    """The model of the folder in transformers, with one list of longrope for all lengths."""
    config = AutoConfig.for_model(**with_one_list(VARIANTS[name], uses_long=uses_long))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    return model.eval()


def assert_greedy(engine, model, prompts, length):
    sampling = SamplingConfig(n=1, max_tokens=length, greedy=True)
    for prompt, rollout in zip(prompts, engine.generate(prompts, sampling), strict=True):
        ids = torch.tensor([prompt.prompt_ids])
        options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
        assert rollout.response_ids == expected[0, ids.size(1) :].tolist()
        logprobs = torch.tensor(rollout.rollout_logprobs)
        torch.testing.assert_close(logprobs, score(model, rollout), atol=LOGPROB_ATOL, rtol=0)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(folders, name, eager):
    folder = folders(name)
    engine = make_engine(folder, enforce_eager=eager)
    assert_greedy(engine, reference(folder, name, uses_long=True), make_prompts(LENGTHS), RESPONSE)


@pytest.mark.parametrize("name", ["longrope", "phi4_mini"])
def test_a_run_of_short_sequences_has_the_short_list(folders, name):
    folder = folders(name)
    engine = make_engine(folder, prompt_length=8, response_length=8)
    assert_greedy(engine, reference(folder, name, uses_long=False), make_prompts([1, 8]), 8)
    arch = arch_from_folder(folder)
    assert for_run(arch, ORIGINAL) != for_run(arch, ORIGINAL + 1)
