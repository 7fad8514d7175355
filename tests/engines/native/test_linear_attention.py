"""Linear attention in the native engine: states that rows carry, however they are filled, copied, moved and parked."""

from dataclasses import replace

import pytest
import torch

from mrl.engines.base import SamplingConfig
from mrl.engines.native.kv_cache import state_shape
from mrl.models.hf_config import arch_from_folder
from tests.engines.native.streams import assert_same, disturbed
from tests.engines.native.test_converse import conversations
from tests.engines.native.test_engine import _generate_on_ranks, score
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts, reference
from tests.ranks import run_ranks

ATOL = 1e-5
LENGTHS = (3, 70, 20, 64, 1)
PROMPTS = make_prompts(LENGTHS)
ROOM = {"prompt_length": 80, "response_length": 60}
SAMPLING = SamplingConfig(n=3, max_tokens=30, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": None,
    "head_dim": 16,
    "initializer_range": 0.06,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
FAMILIES = {
    "qwen3_next": {**LINEAR, **EXPERTS, "mlp_only_layers": [1], "linear_conv_kernel_dim": 3},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
}
WAYS = [
    {},
    {"enforce_eager": True},
    {"max_num_seqs": 1},
    {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    {"max_num_seqs": 7, "enable_prefix_caching": False},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = make_checkpoint(
                tmp_path_factory.mktemp(family), "qwen2", model_type=family, **FAMILIES[family]
            )
        return made[family]

    return folder


@pytest.fixture(scope="module")
def folder(folders):
    return folders("qwen3_5_text")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(folders, family):
    model, prompts = reference(folders(family)), make_prompts((3, 70))
    rollouts = make_engine(folders(family), **ROOM).generate(prompts, SamplingConfig(n=1, max_tokens=16, greedy=True))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert rollout.response_ids == expected[0, ids.size(1) :].tolist()
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), score(model, rollout), atol=ATOL, rtol=0)


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_log_probabilities_are_those_of_transformers(folder, settings):
    model = reference(folder)
    for rollout in make_engine(folder, **ROOM, **settings).generate(PROMPTS, SAMPLING):
        expected = score(model, rollout, SAMPLING.temperature)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("settings", WAYS[1:], ids=str)
def test_tokens_do_not_depend_on_the_batch(folder, settings):
    expected = make_engine(folder, **ROOM).generate(PROMPTS, SAMPLING)
    engine = make_engine(folder, **ROOM, **settings)
    assert_same(engine.generate(PROMPTS[::-1], SAMPLING), expected)
    assert_same(engine.generate(PROMPTS, SAMPLING), expected)  # rows with the states of other sequences


@pytest.mark.parametrize("rows", [4, 15])
def test_samples_that_stop_and_go_on_are_those_of_one_call(folder, rows):
    expected = make_engine(folder, **ROOM).generate(PROMPTS, SAMPLING)
    found, left = disturbed(make_engine(folder, max_num_seqs=rows, **ROOM), SAMPLING, prompts=PROMPTS)
    assert sum(map(len, left)) > 5
    assert_same([replace(one, version_runs=()) for one in found], expected)


def test_episodes_that_pause_continue_their_states(folder):
    expected, _ = conversations(folder)
    model = reference(folder)
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}):
        found, talk = conversations(folder, order=-1, **settings)
        assert max(talk.turns.values()) > 2
        for key, rollout in found.items():
            assert rollout.response_ids == expected[key].response_ids
            own = torch.tensor(rollout.sampled_mask)
            scored = score(model, rollout, 0.9)
            torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs)[own], scored[own], atol=ATOL, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(folders, family):
    sampling = SamplingConfig(n=2, max_tokens=24, temperature=0.9)
    ranks = run_ranks(2, _generate_on_ranks, folders(family), LENGTHS, sampling, ROOM)
    alone = make_engine(folders(family), **ROOM).generate(PROMPTS, sampling)
    assert ranks[0] == ranks[1]
    assert [item[0] for item in ranks[0]] == [one.response_ids for one in alone]


def test_memory_of_states_does_not_depend_on_the_length(folder):
    """Three layers: fp32 states of 4 heads of 8 x 12, and 3 inputs of 80 channels."""
    shape = state_shape(arch_from_folder(folder), 1)
    assert shape.row_bytes(4) == 3 * (4 * 8 * 12 * 4 + 3 * 80 * 4)
    cache = make_engine(folder, **ROOM)._cache
    assert cache.row_bytes(32) - cache.row_bytes(16) == 2 * 2 * 16 * 16 * 4  # one layer with keys and values
    assert cache.row_bytes(16) == 2 * 2 * 16 * 16 * 4 + shape.row_bytes(4)
