"""Work that comes in parts, stops between two tokens and goes on: the tokens are those of one undisturbed call."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.engines._feed import Feed, Work
from mrl.engines.base import SamplingConfig
from mrl.engines.native import streaming
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts

SAME_WEIGHTS_ATOL = 1e-5
"""Keys and values that were read together or one by one differ by roundings of fp32."""

LENGTHS = (3, 9, 20, 9, 5)
SAMPLING = SamplingConfig(n=3, max_tokens=20, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, derandomize=True)


class Parts(Feed):
    """Hands out one part of the work at each pulse, and says stop at the `last`, or once all is whole."""

    def __init__(self, parts, last=None):
        self.parts, self.last = list(parts), last
        self.num_pulses, self.whole, self.waiting = 0, [], []
        self.num_asked = 0

    def pulse(self, finished, num_waiting):
        self.whole += finished
        self.waiting.append(num_waiting)
        self.num_pulses += 1
        if self.num_pulses == self.last or (not self.parts and len(self.whole) == self.num_asked):
            return None
        part = self.parts.pop(0) if self.parts else []
        self.num_asked += sum(work.num_samples for work in part)
        return part


def key_of(one):
    return one.prompt.uid, one.sample_index


def told(rollouts):
    """All but floats, by sample."""
    found = {key_of(r): (list(r.response_ids), r.finish_reason, r.prompt) for r in rollouts}
    assert len(found) == len(rollouts)
    return found


def assert_same(found, expected, atol=SAME_WEIGHTS_ATOL):
    assert told(found) == told(expected)
    others = {key_of(r): r for r in expected}
    for one in found:
        for name in ("rollout_logprobs", "log_kept_mass"):
            mine, other = (torch.tensor(getattr(each, name)) for each in (one, others[key_of(one)]))
            torch.testing.assert_close(mine, other, atol=atol, rtol=0)
        assert (one.support is None) == (others[key_of(one)].support is None)
        if one.support is not None:
            assert torch.equal(one.support.ids_K, others[key_of(one)].support.ids_K)
            assert torch.equal(one.support.counts_R, others[key_of(one)].support.counts_R)


def all_new(prompts, sampling=SAMPLING):
    return [Work(prompt, tuple(range(sampling.n))) for prompt in prompts]


def left_of(begun, feed, sampling, prompts):
    """What is to be handed out next: those that go on, and those that never began."""
    seen = {key_of(one) for one in [*begun, *feed.whole]}
    works = []
    for prompt in prompts:
        new = tuple(i for i in range(sampling.n) if (prompt.uid, i) not in seen)
        mine = tuple(one for one in begun if one.prompt == prompt)
        if new or mine:
            works.append(Work(prompt, new, mine))
    return works


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, max_num_seqs=6, max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def expected(folder):
    return make_engine(folder).generate(make_prompts(LENGTHS), SAMPLING)


@SLOW
@given(st.data())
def test_work_in_any_parts_gives_what_generate_gives(engine, expected, data):
    samples = [(p, i) for p in make_prompts(LENGTHS) for i in range(SAMPLING.n)]
    order = data.draw(st.permutations(samples))
    parts = [[]]
    for prompt, sample in order:
        how = data.draw(st.sampled_from(("same", "work", "pulse", "idle")))
        if how == "same" and parts[-1] and parts[-1][-1].prompt == prompt:
            parts[-1][-1] = Work(prompt, (*parts[-1][-1].new, sample))
            continue
        parts += {"pulse": [[]], "idle": [[], []]}.get(how, [])
        parts[-1].append(Work(prompt, (sample,)))
    feed = Parts(parts)
    assert engine.stream(feed, SAMPLING) == []
    assert_same(feed.whole, expected)
    assert {r.version_runs for r in feed.whole} == {()}


def test_the_feed_is_asked_at_the_start_then_by_decode_steps_and_when_nothing_is_left(engine):
    sampling = replace(SAMPLING, ignore_eos=True)
    feed = Parts([[], all_new(make_prompts([3] * 4))])
    engine.stream(feed, sampling)
    # 12 samples in 6 rows take 19 steps twice; the first two pulses have nothing to run
    assert feed.num_pulses == 2 + -(-2 * (sampling.max_tokens - 1) // streaming.PULSE)
    assert feed.waiting == [0, 0, 6, 6, 0, 0, 0]
    assert engine.stats()["decode_steps"] == 2 * (sampling.max_tokens - 1)


@pytest.mark.parametrize("pulse", [1, 3])
@pytest.mark.parametrize("last", [2, 3, 4, 7])
def test_stopped_and_continued_again_and_again_it_samples_the_same(monkeypatch, engine, expected, last, pulse):
    monkeypatch.setattr(streaming, "PULSE", pulse)
    prompts, whole, num_calls = make_prompts(LENGTHS), [], 0
    work = all_new(prompts)
    while work:
        feed = Parts([work], last)
        begun = engine.stream(feed, SAMPLING)
        assert begun == sorted(begun, key=key_of)
        whole += feed.whole
        feed.whole = whole
        work, num_calls = left_of(begun, feed, SAMPLING, prompts), num_calls + 1
    assert_same(whole, expected)
    assert num_calls > 1
