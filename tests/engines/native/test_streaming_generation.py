"""Work that comes in parts, stops between two tokens and goes on: the tokens are those of one undisturbed call."""

import random
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.engines._work_queue import PromptWork
from mrl.engines.base import RolloutEngine
from mrl.engines.native import streaming_generation
from mrl.engines.native.streaming_generation import merge_versions
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.types import PartialRollout
from tests.engines.native.streams import (
    ALL,
    CUT,
    LENGTHS,
    NARROW,
    PROMPTS,
    SAMPLING,
    Parts,
    assert_same,
    disturbed,
    key_of,
    not_begun,
    told,
    undisturbed,
    work_of,
)
from tests.engines.native.test_engine import LOGPROB_ATOL, reference, score
from tests.engines.native.test_experts import FAMILIES as EXPERTS
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts, refit

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, derandomize=True)
NUM_SCHEDULES = 200
SHORT = replace(SAMPLING, n=2, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Weights of later versions."""
    return [
        make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", initializer_range=spread) for spread in (0.13, 0.17)
    ]


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, **NARROW)


@pytest.fixture(scope="module")
def cheap(tmp_path_factory):
    """An engine of one layer."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return make_engine(make_checkpoint(tmp_path_factory.mktemp("cheap"), "qwen2", **shape), **NARROW)


@pytest.fixture(scope="module")
def by_cheap(cheap):
    return undisturbed(cheap)


# one call -------------------------------------------------------------------------------------------------------------


@SLOW
@given(st.data())
def test_work_in_any_parts_gives_what_generate_gives(cheap, by_cheap, data):
    parts = [[]]
    for prompt, sample in data.draw(st.permutations(ALL)):
        how = data.draw(st.sampled_from(("same", "work", "pulse", "idle")))
        if how == "same" and parts[-1] and parts[-1][-1].prompt == prompt:
            parts[-1][-1] = PromptWork(prompt, (*parts[-1][-1].new_indices, sample))
            continue
        parts += {"pulse": [[]], "idle": [[], []]}.get(how, [])
        parts[-1].append(PromptWork(prompt, (sample,)))
    feed = Parts(parts, most=data.draw(st.integers(1, len(ALL))))
    assert cheap.generate_streaming(feed, SAMPLING) == []
    assert cheap.stats()["max_running"] <= feed.max_samples  # where there is room for fewer than come, the others wait
    assert_same(feed.whole, by_cheap)
    assert {r.version_runs for r in feed.whole} == {()}


def test_the_feed_is_asked_at_the_start_then_by_decode_steps_and_when_nothing_is_left(engine):
    sampling = replace(SAMPLING, max_tokens=20, ignore_eos=True)
    feed = Parts([[], work_of(ALL)])
    engine.generate_streaming(feed, sampling)
    num_steps = 3 * (sampling.max_tokens - 1)  # 15 samples in 6 rows; the first token of each needs no step
    assert engine.stats()["decode_steps"] == num_steps
    assert feed.num_pulses == 2 + -(-num_steps // streaming_generation.poll_interval(sampling.max_tokens))
    assert [count for count, _ in groupby(feed.waiting)] == [0, 9, 3, 0]
    assert engine.stats()["max_running"] == NARROW["max_num_seqs"]


@pytest.mark.parametrize(("max_tokens", "steps"), [(1, 1), (4, 1), (16, 2), (63, 7), (64, 8), (8192, 8)])
def test_short_responses_are_looked_at_more_often(max_tokens, steps):
    assert streaming_generation.poll_interval(max_tokens) == steps


def test_a_prompt_is_read_once_for_its_samples(folder, engine):
    engine.generate_streaming(Parts([work_of(ALL)]), SAMPLING)
    assert engine.stats()["prefill_tokens"] == sum(LENGTHS)
    single = make_engine(folder, enable_prefix_caching=False)
    single.generate_streaming(Parts([work_of(ALL)]), SAMPLING)
    assert single.stats()["prefill_tokens"] == SAMPLING.n * sum(LENGTHS)


def test_a_tight_cache_makes_samples_wait(folder, engine):
    tight = make_engine(folder, prompt_length=20, max_num_batched_tokens=64)
    row_bytes = tight._cache.row_bytes(48)  # 20 + 14 tokens, rounded up to 16
    tight._cache.budget_bytes = 3 * row_bytes - 1
    whole, _ = disturbed(tight)
    assert_same(whole, undisturbed(engine))
    assert tight.stats()["kv_cache_bytes"] == 2 * row_bytes


def test_room_is_made_for_what_may_come_and_for_no_more(folder):
    engine, pool_bytes = make_engine(folder), []
    for most in (1, 2, 7, 15, 10**9):
        engine.generate_streaming(Parts([work_of(ALL[:1])], most=most), SAMPLING)
        pool_bytes.append(engine.stats()["kv_cache_bytes"])
        engine.sleep()
        engine.wake()
    rows = engine.spec.config.max_num_seqs
    assert pool_bytes == [pool_bytes[0] * most for most in (1, 2, 7, 15, rows)] and rows > 15


def test_what_the_feed_hands_out_late_needs_no_other_cache(folder):
    engine = make_engine(folder)
    feed = Parts([work_of([(PROMPTS[0], 0)])])
    engine.generate_streaming(feed, SAMPLING)
    before = [keys.data_ptr() for keys in engine._cache.keys], engine._rows
    engine.generate_streaming(Parts([work_of(ALL[:2]), [], work_of(ALL[4:])]), SAMPLING)
    assert ([keys.data_ptr() for keys in engine._cache.keys], engine._rows) == before


# stopped, and on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pulse", "last"), [(1, 2), (1, 3), (1, 7), (3, 2), (3, 4)])
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_stopped_again_and_again_it_samples_the_same(monkeypatch, engine, cut, pulse, last):
    monkeypatch.setattr(streaming_generation, "poll_interval", lambda max_tokens: pulse)
    sampling = replace(SAMPLING, return_kept_tokens=bool(cut), **cut)
    whole, left = disturbed(engine, sampling, last)
    assert_same(whole, undisturbed(engine, sampling))
    assert any(left)
    assert {r.version_runs for r in whole} == {()}


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_under_other_weights_old_tokens_stay_and_new_ones_score_as_transformers_scores_them(
    monkeypatch, folder, others, cut
):
    monkeypatch.setattr(streaming_generation, "poll_interval", lambda max_tokens: 3)
    sampling = replace(SAMPLING, return_kept_tokens=bool(cut), **cut)
    engine, folders = make_engine(folder, **NARROW), [folder, *others]
    versions = [10, 11, 15]
    refit(engine, folder, engine.spec.arch, versions[0])

    def update(num_calls):
        if num_calls < len(folders):
            refit(engine, folders[num_calls], arch_from_folder(folder), versions[num_calls])

    whole, left = disturbed(engine, sampling, 3, update)
    models = {version: reference(each) for version, each in zip(versions, folders, strict=True)}
    assert {len(r.versions) for r in whole} == {1, 2, 3}
    assert {r.version_runs for r in whole if len(r.versions) == 1} == {()}
    for rollout in whole:
        ends = 0
        for version, count in rollout.versions:
            part = slice(ends, ends + count)
            ends += count
            expected = score(models[version], rollout, sampling.temperature, **cut)
            mine = torch.tensor(rollout.rollout_logprobs)
            torch.testing.assert_close(mine[part], expected[part], atol=LOGPROB_ATOL, rtol=0)
        assert ends == len(rollout.response_ids)
        assert rollout.policy_version == rollout.versions[-1][0]
    final = {key_of(r): r for r in whole}
    for begun in (each for part in left for each in part):
        rollout, count = final[key_of(begun)], len(begun.response_ids)
        assert tuple(rollout.response_ids[:count]) == begun.response_ids
        assert tuple(rollout.rollout_logprobs[:count]) == begun.rollout_logprobs
        assert tuple(rollout.log_kept_mass[:count]) == begun.log_kept_mass
        assert cut or begun.kept_tokens is None
        if cut:
            assert told(rollout.kept_tokens.split([count, len(rollout.response_ids) - count])[0]) == told(
                begun.kept_tokens
            )


def test_runs_of_one_version_are_one():
    assert merge_versions([(1, 2), (1, 3), (4, 1), (4, 2), (1, 1)]) == ((1, 5), (4, 3), (1, 1))


def test_a_stop_string_across_the_break_is_found(monkeypatch, folder):
    monkeypatch.setattr(streaming_generation, "poll_interval", lambda max_tokens: 1)
    engine = make_engine(folder, decode=lambda ids: "".join(f"{i:02d}" for i in ids))
    free = replace(SAMPLING, max_tokens=12, temperature=2.0, stop_token_ids=())
    wanted = "".join(f"{i:02d}" for i in undisturbed(engine, free)[3].response_ids)[9:13]  # spans three tokens
    sampling = replace(free, stop=(wanted, "no such"))
    expected = undisturbed(engine, sampling)
    assert (expected[3].finish_reason, len(expected[3].response_ids)) == ("stop", 7)
    for last in (2, 3):  # of 1 and 2 tokens each call: the string is cut at either of its tokens
        whole, left = disturbed(engine, sampling, last)
        assert_same(whole, expected)
        mine = [len(one.response_ids) for part in left for one in part if key_of(one) == key_of(expected[3])]
        assert set(mine) & {5, 6}


def test_what_is_begun_goes_first_and_what_had_no_room_is_given_back_as_it_came_or_not_at_all(monkeypatch, folder):
    monkeypatch.setattr(streaming_generation, "poll_interval", lambda max_tokens: 2)
    sampling = replace(SAMPLING, ignore_eos=True)
    begun = make_engine(folder).generate_streaming(Parts([work_of(ALL[1::2])], 2), sampling)
    assert [len(one.response_ids) for one in begun] == [3] * 7
    assert {one.version_runs for one in begun} == {((0, 3),)}
    feed = Parts([work_of(ALL[::2], begun)], 2)
    narrow = make_engine(folder, max_num_seqs=2)
    left = narrow.generate_streaming(feed, sampling)
    assert [key_of(one) for one in left] == [key_of(one) for one in begun]
    assert [len(one.response_ids) for one in left[:2]] == [6, 6]
    assert all(one is old for one, old in zip(left[2:], begun[2:], strict=True))
    assert feed.waiting == [0, 8 + 5] and not feed.whole
    assert narrow.stats()["reread_tokens"] == sum(len(one.prompt.prompt_ids) + 3 for one in begun[:2])


@pytest.mark.slow
def test_none_is_lost_or_doubled_whatever_is_stopped_when(monkeypatch, cheap):
    """Each call hands out in three parts some of what has not begun, and all that goes on but what is too old."""
    samples = [(prompt, sample) for prompt, sample in ALL if sample < SHORT.n]
    expected, num_calls, num_left = undisturbed(cheap, SHORT), 0, 0
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        steps = rng.choice((1, 2, 4))
        monkeypatch.setattr(streaming_generation, "poll_interval", lambda max_tokens, steps=steps: steps)
        whole, begun = [], []
        while begun or not_begun(whole, samples=samples):
            begun = [one for one in begun if rng.random() < 0.9]
            new = [(rng.randrange(4), sample) for sample in not_begun(whole, begun, samples=samples)]
            old = [(rng.randrange(3), one) for one in begun]
            parts = [work_of(*([one for at, one in some if at == part] for some in (new, old))) for part in range(3)]
            feed = Parts(parts, rng.choice((None, 2, 3, 4, 6)))
            left = cheap.generate_streaming(feed, SHORT)
            late = [one for part in feed.parts for work in part for one in work.partial_rollouts]
            whole, begun = [*whole, *feed.whole], [*left, *late]
            found = {key_of(one) for one in [*whole, *begun]}
            assert len(found) == len(whole) + len(begun)
            assert found >= {key_of(one) for _, one in old}
            num_calls, num_left = num_calls + 1, num_left + len(left)
        assert_same(whole, expected)
    assert num_calls > 3 * NUM_SCHEDULES and num_left > 5 * NUM_SCHEDULES


# told to stop, and what cannot be -------------------------------------------------------------------------------------


def test_one_that_was_told_to_stop_samples_no_more_and_asks_until_it_may_leave(folder):
    engine, feed = make_engine(folder), Parts([work_of(ALL[:4]), [], work_of(ALL[4:])], 9)
    full = replace(SAMPLING, ignore_eos=True)
    engine.abort_requested = lambda: feed.num_pulses == 2
    begun = engine.generate_streaming(feed, full)
    assert {key_of(one) for one in begun} == {(prompt.uid, sample) for prompt, sample in ALL[:4]} and not feed.whole
    assert feed.num_pulses == 9
    assert engine.stats()["decode_steps"] == streaming_generation.poll_interval(SAMPLING.max_tokens)
    engine.abort_requested = lambda: False
    feed = Parts([work_of(not_begun(begun), begun)])
    assert engine.generate_streaming(feed, full) == []
    assert_same(feed.whole, undisturbed(engine, full))


def test_it_refuses_what_cannot_go_on(folder, engine):
    prompt = PROMPTS[0]

    def go_on(sampling=SAMPLING, of=engine, **fields):
        begun = replace(PartialRollout(prompt, 1, (1, 2), (-1.0, -2.0), ((0, 2),)), **fields)
        of.generate_streaming(Parts([[PromptWork(prompt, (), (begun,))]]), sampling)

    go_on()
    with pytest.raises(RuntimeError, match="partial rollout 1 of prompt 10 has 0 tokens; 1 to 13 are allowed"):
        go_on(response_ids=(), rollout_logprobs=(), version_runs=())
    with pytest.raises(RuntimeError, match="log-probabilities of 1, and versions of 2"):
        go_on(rollout_logprobs=(-1.0,))
    with pytest.raises(RuntimeError, match="log-probabilities of 2, and versions of 3"):
        go_on(version_runs=((0, 2), (1, 1)))
    with pytest.raises(RuntimeError, match="kept token ids for 0 of its"):
        go_on(replace(SAMPLING, return_kept_tokens=True, **CUT))
    with pytest.raises(UserError, match="vocabulary"):
        go_on(response_ids=(1, 99))
    with pytest.raises(UserError, match="max_num_batched_tokens=4, and chunked prefill is off"):
        go_on(of=make_engine(folder, enable_chunked_prefill=False, max_num_batched_tokens=4))
    with pytest.raises(UserError, match=r"65 tokens; the engine's limit is 64\. Raise rollout\.prompt_length"):
        engine.generate_streaming(Parts([[PromptWork(make_prompts([65])[0], (0,))]]), SAMPLING)
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        go_on()
    engine.wake()
    go_on()


def test_experts_are_recorded_of_what_becomes_whole_and_nothing_else_may_stop(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2", model_type="qwen3_moe", **EXPERTS["qwen3_moe"])
    engine = make_engine(folder, enable_rollout_routing_replay=True)
    expected, feed = undisturbed(engine), Parts([work_of(ALL[:4]), work_of(ALL[4:])])
    assert engine.generate_streaming(feed, SAMPLING) == []
    assert_same(feed.whole, expected)
    recorded = {key_of(one): one.routed_experts for one in expected}
    assert all(torch.equal(one.routed_experts, recorded[key_of(one)]) for one in feed.whole)
    with pytest.raises(RuntimeError, match="enable_rollout_routing_replay=false"):
        engine.generate_streaming(Parts([work_of(ALL)], 2), SAMPLING)
    begun = make_engine(folder).generate_streaming(Parts([work_of(ALL)], 2), SAMPLING)
    with pytest.raises(RuntimeError, match="enable_rollout_routing_replay=false"):
        engine.generate_streaming(Parts([work_of([], begun)]), SAMPLING)


def test_an_engine_that_only_generates_streams_whole_responses(engine):
    feed = Parts([work_of(ALL[:4]), [], [*work_of(ALL[4:6]), *work_of(ALL[6:9])], work_of(ALL[9:])])
    assert RolloutEngine.generate_streaming(engine, feed, SAMPLING) == []
    assert_same(feed.whole, undisturbed(engine))
    assert set(feed.waiting) == {0}
    begun = engine.generate_streaming(Parts([work_of(ALL)], 2), SAMPLING)
    with pytest.raises(RuntimeError, match=rf"partial rollouts \({len(begun)} pending\).*rollout\.name=native"):
        RolloutEngine.generate_streaming(engine, Parts([work_of([], begun)]), SAMPLING)
