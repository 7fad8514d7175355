"""Sliding windows in the native engine: rows that are rings, however they are read, filled, copied and left."""

import pytest
import torch

from mrl.config.config import SpeculativeConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.native import kv_cache
from mrl.engines.native.kv_cache import KVCache
from tests.engines.native.streams import disturbed, exact, key_of
from tests.engines.native.test_converse import conversations
from tests.engines.native.test_engine import LOGPROB_ATOL, _generate_on_ranks, reference, score
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts
from tests.ranks import run_ranks

LENGTHS = (3, 70, 150, 64, 9)
PROMPTS = make_prompts(LENGTHS)
ROOM = {"prompt_length": 160, "response_length": 90}
SAMPLING = SamplingConfig(n=3, max_tokens=80, temperature=0.9, stop_token_ids=(5, 6), seed=1)
DRAFTS = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
FAMILIES = ["mistral", "qwen2_windows", "gemma3_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def small_rings(monkeypatch):
    """Rings of 64 slots, the least that compiled attention reads."""
    monkeypatch.setattr(kv_cache, "RING_SPARE", 16)


def in_bits(rollouts):
    return {key_of(one): exact(one) for one in rollouts}


def assert_scored(folder, rollouts):
    model = reference(folder)
    for rollout in rollouts:
        torch.testing.assert_close(
            torch.tensor(rollout.rollout_logprobs), score(model, rollout, 0.9), atol=LOGPROB_ATOL, rtol=0
        )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("rows", [3, 100])
def test_log_probabilities_are_those_of_transformers(folder, small_rings, eager, rows):
    engine = make_engine(folder, enforce_eager=eager, max_num_seqs=rows, **ROOM)
    assert_scored(folder, engine.generate(PROMPTS, SAMPLING))
    assert engine._cache.wraps


def test_two_ranks_give_the_tokens_of_one(folder):
    """In new processes, so with rings of the usual size."""
    sampling = SamplingConfig(n=1, max_tokens=24, temperature=0.9)
    ranks = run_ranks(2, _generate_on_ranks, folder, LENGTHS, sampling, ROOM)
    alone = make_engine(folder, **ROOM).generate(PROMPTS, sampling)
    assert [item[0] for item in ranks[0]] == [one.response_ids for one in alone]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rings_chunks_batches_and_drafts_change_no_bit(folder, monkeypatch, dtype):
    whole = make_engine(folder, dtype=dtype, true_on_policy=True, **ROOM)
    expected = in_bits(whole.generate(PROMPTS, SAMPLING))
    assert not whole._cache.wraps
    monkeypatch.setattr(kv_cache, "RING_SPARE", 16)
    for settings in (
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7},
        {"max_num_seqs": 4, "enable_prefix_caching": False},
        {"speculative": DRAFTS},
    ):
        engine = make_engine(folder, dtype=dtype, true_on_policy=True, **ROOM, **settings)
        assert in_bits(engine.generate(PROMPTS[::-1], SAMPLING)) == expected
        assert engine._cache.wraps


@pytest.mark.compiler
def test_samples_that_stop_and_go_on_keep_every_bit(folder, small_rings):
    engine = make_engine(folder, true_on_policy=True, max_num_seqs=4, **ROOM)
    expected = in_bits(engine.generate(PROMPTS, SAMPLING))
    found, left = disturbed(engine, SAMPLING, prompts=PROMPTS)
    assert sum(map(len, left)) > 5
    assert in_bits(found) == expected


@pytest.mark.compiler
def test_episodes_that_pause_keep_every_bit(folder, small_rings, monkeypatch):
    monkeypatch.setattr("tests.engines.native.test_converse.make_prompts", lambda lengths: make_prompts((3, 30, 64, 5)))
    expected, _ = conversations(folder, true_on_policy=True, **ROOM)
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}):
        found, _ = conversations(folder, order=-1, true_on_policy=True, **ROOM, **settings)
        assert in_bits(found.values()) == in_bits(expected.values())


def test_a_layer_with_a_window_holds_the_window_and_one_forward():
    cache = KVCache(
        windows=[None, 4096], num_kv_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"),
        budget_bytes=2**30,
    )  # fmt: skip
    cache.reserve(2, 100_000)
    assert cache.wraps and cache.most_tokens == 1024
    assert [keys.size(2) for keys in cache.keys] == [100_000, 5120]
    assert cache.row_bytes(100_000) == 2 * 8 * 4 * 105_120
    assert cache.allocated_bytes == 2 * cache.row_bytes(100_000)
    short = KVCache(
        windows=[None, 4096], num_kv_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"),
        budget_bytes=2**30,
    )  # fmt: skip
    short.reserve(2, 4000)
    assert not short.wraps and short.most_tokens is None and short.keys[1].size(2) == 4000
