"""Conversations in the native engine: what is sampled between answers, and that answers change nothing before them."""

from dataclasses import replace

import pytest
import torch

from mrl.engines._multiturn_base import MultiTurnClient
from mrl.engines.base import SamplingConfig
from tests.engines.native.test_engine import LOGPROB_ATOL, reference, score
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts
from tests.ranks import run_ranks

ENDS = tuple(range(3, 21))
TURNS = 8
LENGTHS = (3, 9, 20, 5)
SAMPLING = SamplingConfig(n=2, max_tokens=60, temperature=0.9, stop_token_ids=ENDS, seed=2)


class Scripted(MultiTurnClient):
    """Answers with one to three tokens that follow from what was said, `TURNS` turns long, or while there is room."""

    def __init__(self, limit=60):
        self.limit, self.said, self.turns, self.answered = limit, {}, {}, {}

    def submit(self, stopped):
        said = self.said.setdefault(stopped.key, [])
        said += [(token, True) for token in stopped.ids]
        self.turns[stopped.key] = self.turns.get(stopped.key, 0) + 1
        answer = [30 + (sum(stopped.ids) + i) % 50 for i in range(1 + stopped.ids[-1] % 3)]
        over = self.turns[stopped.key] == TURNS or stopped.finish_reason == "length"
        if over or len(said) + len(answer) >= self.limit:
            answer = None
        else:
            said += [(token, False) for token in answer]
        self.answered[stopped.key] = answer

    def wait_for_replies(self, keys):
        return [self.answered.pop(key) for key in keys]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


def conversations(folder, *, sampling=SAMPLING, order=1, **settings):
    """What is said by (prompt, sample), and the talk."""
    talk, prompts = Scripted(sampling.max_tokens), make_prompts(LENGTHS)[::order]
    rollouts = make_engine(folder, **settings).generate_multi_turn(prompts, sampling, talk)
    assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [
        (p.uid, i) for p in prompts for i in range(sampling.n)
    ]
    for place, rollout in enumerate(rollouts):
        said = talk.said[place // sampling.n, rollout.sample_index]
        assert list(zip(rollout.response_ids, rollout.sampled_mask, strict=True)) == said
    return {(r.prompt.uid, r.sample_index): r for r in rollouts}, talk


def test_tokens_seen_are_tokens_told_and_sampled_ones_score_as_transformers_scores_them(folder):
    found, talk = conversations(folder)
    model = reference(folder)
    assert max(talk.turns.values()) == TURNS
    for rollout in found.values():
        own = torch.tensor(rollout.sampled_mask)
        expected = score(model, rollout, SAMPLING.temperature)
        torch.testing.assert_close(
            torch.tensor(rollout.rollout_logprobs)[own], expected[own], atol=LOGPROB_ATOL, rtol=0
        )
        assert not torch.tensor(rollout.rollout_logprobs)[~own].any()
        assert len(rollout.response_ids) <= SAMPLING.max_tokens
        assert rollout.sampled_mask[-1]
    assert len({tuple(r.response_ids) for r in found.values()}) == len(found)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}],
    ids=str,
)
def test_conversations_do_not_depend_on_the_batch(folder, settings):
    expected, _ = conversations(folder)
    found, _ = conversations(folder, order=-1, **settings)
    assert {key: r.response_ids for key, r in found.items()} == {key: r.response_ids for key, r in expected.items()}
    assert {key: r.finish_reason for key, r in found.items()} == {key: r.finish_reason for key, r in expected.items()}


def test_room_is_for_observed_tokens_too(folder):
    sampling = SamplingConfig(n=2, max_tokens=12, temperature=0.9, stop_token_ids=ENDS, seed=2)
    found, _ = conversations(folder, sampling=sampling, max_model_len=20 + 12)
    lengths = [len(r.response_ids) for r in found.values()]
    assert max(lengths) <= 12
    assert {r.finish_reason for r in found.values() if len(r.response_ids) == 12} <= {"length", "stop"}
    assert "length" in {r.finish_reason for r in found.values()}


def _converse_on_ranks(folder):
    group = torch.distributed.group.WORLD
    found, _ = conversations(folder, tp_group=group)
    return [(r.response_ids, r.rollout_logprobs, r.sampled_mask) for r in found.values()]


def test_two_ranks_hold_the_conversations_of_one(folder):
    ranks = run_ranks(2, _converse_on_ranks, folder)
    alone, _ = conversations(folder)
    for found in ranks:
        for (ids, logprobs, mask), rollout in zip(found, alone.values(), strict=True):
            assert (ids, mask) == (rollout.response_ids, rollout.sampled_mask)
            torch.testing.assert_close(
                torch.tensor(logprobs), torch.tensor(rollout.rollout_logprobs), atol=LOGPROB_ATOL, rtol=0
            )


def test_what_was_kept_is_told_of_sampled_tokens_alone(folder):
    sampling = replace(SAMPLING, top_p=0.9, return_kept_tokens=True)
    found, _ = conversations(folder, sampling=sampling)
    plain, _ = conversations(folder, sampling=replace(sampling, return_kept_tokens=False))
    for key, rollout in found.items():
        assert (rollout.response_ids, plain[key].kept_tokens) == (plain[key].response_ids, None)
        own = torch.tensor(rollout.sampled_mask)
        kept = rollout.kept_tokens.split([1] * len(own))
        assert torch.equal(rollout.kept_tokens.counts_R > 0, own)
        assert all(
            token in part.ids_K for token, part, mine in zip(rollout.response_ids, kept, own, strict=True) if mine
        )
        assert torch.equal(torch.tensor(rollout.log_kept_mass) < 0, own)
