"""True on-policy mode in the engine: however it reads and decodes, tokens and log-probabilities keep every bit."""

import pytest
import torch

from mrl.config.config import SpeculativeConfig
from mrl.engines.base import SamplingConfig
from tests.engines.native.streams import NARROW, PROMPTS, disturbed, exact, key_of
from tests.engines.native.test_converse import conversations
from tests.engines.native.test_engine import LOGPROB_ATOL, reference, score
from tests.engines.native.tiny import make_checkpoint, make_engine

pytestmark = pytest.mark.compiler

DTYPES = [torch.float32, torch.bfloat16]
SAMPLING = SamplingConfig(n=3, max_tokens=14, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
CUT = SamplingConfig(n=2, max_tokens=9, temperature=1.2, top_p=0.8, top_k=20, seed=4, return_kept_tokens=True)

DRAFTS = SpeculativeConfig(method="ngram", prompt_lookup_min=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def in_bits(rollouts):
    return {key_of(one): exact(one) for one in rollouts}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling", [SAMPLING, CUT], ids=["whole", "cut"])
def test_batches_chunks_and_shared_prompts_change_no_bit(folder, dtype, sampling):
    wide = make_engine(folder, dtype=dtype, true_on_policy=True)
    expected = in_bits(wide.generate(PROMPTS, sampling))
    for settings in ({"max_num_seqs": 1}, {**NARROW, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False},
                     {"speculative": DRAFTS}):  # fmt: skip
        engine = make_engine(folder, dtype=dtype, true_on_policy=True, **settings)
        assert in_bits(engine.generate(PROMPTS[::-1], sampling)) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_that_stops_and_is_read_again_keeps_every_bit(folder, dtype):
    engine = make_engine(folder, dtype=dtype, true_on_policy=True, **NARROW)
    expected = in_bits(engine.generate(PROMPTS, SAMPLING))
    found, left = disturbed(engine, SAMPLING)
    assert sum(map(len, left)) > 5
    assert in_bits(found) == expected


def test_turns_of_a_conversation_keep_every_bit(folder):
    expected, _ = conversations(folder, true_on_policy=True)
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}):
        found, _ = conversations(folder, order=-1, true_on_policy=True, **settings)
        assert in_bits(found.values()) == in_bits(expected.values())


def test_log_probabilities_are_those_of_transformers(folder):
    model = reference(folder)
    for rollout in make_engine(folder, true_on_policy=True).generate(PROMPTS, SAMPLING):
        expected = score(model, rollout, SAMPLING.temperature)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, atol=LOGPROB_ATOL, rtol=0)


def test_bfloat16_is_computed_in_bfloat16_on_any_processor(folder, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert make_engine(folder, dtype=torch.bfloat16, true_on_policy=True)._model.dtype == torch.bfloat16
    assert make_engine(folder, dtype=torch.bfloat16)._model.dtype == torch.float32
