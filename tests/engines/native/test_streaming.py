"""Work that comes in parts, stops between two tokens and goes on: the tokens are those of one undisturbed call."""

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.engines._feed import Feed, Work
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.engines.native import streaming
from mrl.engines.native.streaming import merged
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.types import Begun
from tests.engines.native.test_engine import LOGPROB_ATOL, reference, score
from tests.engines.native.test_experts import FAMILIES as EXPERTS
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts, refit
from tests.ranks import run_ranks

SAME_WEIGHTS_ATOL = 1e-5
"""Keys and values that were read together or one by one differ by roundings of fp32."""

LENGTHS = (3, 9, 20, 9, 5)
PROMPTS = make_prompts(LENGTHS)
SAMPLING = SamplingConfig(n=3, max_tokens=14, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
CUT = {"top_p": 0.9, "top_k": 30}
NARROW = {"max_num_seqs": 6, "max_num_batched_tokens": 16}
ALL = [(prompt, sample) for prompt in PROMPTS for sample in range(SAMPLING.n)]

SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40, derandomize=True)
NUM_SCHEDULES = 200


class Parts(Feed):
    """Hands out one part of the work at each pulse, and says stop at the `last`, or once all is whole."""

    def __init__(self, parts, last=None):
        self.parts, self.last = list(parts), last
        self.num_pulses, self.num_asked, self.whole, self.waiting = 0, 0, [], []

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


def work_of(samples, begun=()):
    """Of each prompt the samples that begin and those that go on."""
    new, old = {}, {}
    for prompt, sample in samples:
        new.setdefault(prompt.uid, []).append(sample)
    for one in begun:
        old.setdefault(one.prompt.uid, []).append(one)
    return [Work(p, tuple(new.get(p.uid, ())), tuple(old.get(p.uid, ()))) for p in PROMPTS if p.uid in {**new, **old}]


def not_begun(*found):
    seen = {key_of(one) for part in found for one in part}
    return [(prompt, sample) for prompt, sample in ALL if (prompt.uid, sample) not in seen]


def undisturbed(engine, sampling=SAMPLING):
    return engine.generate(PROMPTS, sampling)


def disturbed(engine, sampling=SAMPLING, last=3, between=lambda num_calls: None):
    """Whole responses of calls that stop at their `last` pulse, and what each left; `between` is told how many were."""
    whole, begun, left = [], [], []
    while begun or not_begun(whole):
        feed = Parts([work_of(not_begun(whole, begun), begun)], last)
        begun = engine.stream(feed, sampling)
        assert begun == sorted(begun, key=key_of)
        whole += feed.whole
        left.append(begun)
        between(len(left))
    return whole, left


def assert_same(found, expected, atol=SAME_WEIGHTS_ATOL):
    """Each sample once; its floats to `atol`."""
    others = {key_of(one): one for one in expected}
    assert sorted(map(key_of, found)) == sorted(others)
    for one in found:
        other = others[key_of(one)]
        for name in ("prompt", "response_ids", "finish_reason"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("rollout_logprobs", "log_kept_mass"):
            mine, its = (torch.tensor(getattr(each, name)) for each in (one, other))
            torch.testing.assert_close(mine, its, atol=atol, rtol=0)
        assert told(one.support) == told(other.support)


def told(support):
    return support and (support.ids_K.tolist(), support.counts_R.tolist())


def exact(one):
    """All of a whole or begun response, comparable bit for bit."""
    return (
        *key_of(one), tuple(one.response_ids), tuple(one.rollout_logprobs), one.version_runs, told(one.support),
        tuple(one.log_kept_mass),
    )  # fmt: skip


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


# one call -------------------------------------------------------------------------------------------------------------


@SLOW
@given(st.data())
def test_work_in_any_parts_gives_what_generate_gives(cheap, data):
    parts = [[]]
    for prompt, sample in data.draw(st.permutations(ALL)):
        how = data.draw(st.sampled_from(("same", "work", "pulse", "idle")))
        if how == "same" and parts[-1] and parts[-1][-1].prompt == prompt:
            parts[-1][-1] = Work(prompt, (*parts[-1][-1].new, sample))
            continue
        parts += {"pulse": [[]], "idle": [[], []]}.get(how, [])
        parts[-1].append(Work(prompt, (sample,)))
    feed = Parts(parts)
    assert cheap.stream(feed, SAMPLING) == []
    assert_same(feed.whole, undisturbed(cheap))
    assert {r.version_runs for r in feed.whole} == {()}


def test_the_feed_is_asked_at_the_start_then_by_decode_steps_and_when_nothing_is_left(engine):
    sampling = replace(SAMPLING, max_tokens=20, ignore_eos=True)
    feed = Parts([[], work_of(ALL)])
    engine.stream(feed, sampling)
    num_steps = 3 * (sampling.max_tokens - 1)  # 15 samples in 6 rows; the first token of each needs no step
    assert engine.stats()["decode_steps"] == num_steps
    assert feed.num_pulses == 2 + -(-num_steps // streaming.PULSE)
    assert feed.waiting == [0, 0, 9, 9, 3, 3, 3, 0, 0, 0]
    assert engine.stats()["max_running"] == NARROW["max_num_seqs"]


def test_a_prompt_is_read_once_for_its_samples(folder, engine):
    engine.stream(Parts([work_of(ALL)]), SAMPLING)
    assert engine.stats()["prefill_tokens"] == sum(LENGTHS)
    single = make_engine(folder, enable_prefix_caching=False)
    single.stream(Parts([work_of(ALL)]), SAMPLING)
    assert single.stats()["prefill_tokens"] == SAMPLING.n * sum(LENGTHS)


def test_a_tight_cache_makes_samples_wait(folder, engine):
    tight = make_engine(folder, prompt_length=20, max_num_batched_tokens=64)
    row_bytes = 48 * tight._cache.token_bytes  # 20 + 14 tokens, rounded up to 16
    tight._cache.budget_bytes = 3 * row_bytes - 1
    whole, _ = disturbed(tight)
    assert_same(whole, undisturbed(engine))
    assert tight.stats()["kv_cache_bytes"] == 2 * row_bytes


def test_what_the_feed_hands_out_late_needs_no_other_cache(folder):
    engine = make_engine(folder)
    feed = Parts([work_of([(PROMPTS[0], 0)])])
    engine.stream(feed, SAMPLING)
    before = [keys.data_ptr() for keys in engine._cache.keys], engine._rows
    engine.stream(Parts([work_of(ALL[:2]), [], work_of(ALL[4:])]), SAMPLING)
    assert ([keys.data_ptr() for keys in engine._cache.keys], engine._rows) == before


# stopped, and on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pulse", [1, 3])
@pytest.mark.parametrize("last", [2, 3, 4, 7])
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_stopped_again_and_again_it_samples_the_same(monkeypatch, engine, cut, last, pulse):
    monkeypatch.setattr(streaming, "PULSE", pulse)
    sampling = replace(SAMPLING, with_support=bool(cut), **cut)
    whole, left = disturbed(engine, sampling, last)
    assert_same(whole, undisturbed(engine, sampling))
    assert any(left)
    assert {r.version_runs for r in whole} == {()}


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_under_other_weights_old_tokens_stay_and_new_ones_score_as_transformers_scores_them(
    monkeypatch, folder, others, cut
):
    monkeypatch.setattr(streaming, "PULSE", 3)
    sampling = replace(SAMPLING, with_support=bool(cut), **cut)
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
        assert cut or begun.support is None
        if cut:
            assert told(rollout.support.split([count, len(rollout.response_ids) - count])[0]) == told(begun.support)


def test_runs_of_one_version_are_one():
    assert merged([(1, 2), (1, 3), (4, 1), (4, 2), (1, 1)]) == ((1, 5), (4, 3), (1, 1))


def test_a_stop_string_across_the_break_is_found(monkeypatch, folder):
    monkeypatch.setattr(streaming, "PULSE", 1)
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
    monkeypatch.setattr(streaming, "PULSE", 2)
    sampling = replace(SAMPLING, ignore_eos=True)
    begun = make_engine(folder).stream(Parts([work_of(ALL[1::2])], 2), sampling)
    assert [len(one.response_ids) for one in begun] == [3] * 7
    assert {one.version_runs for one in begun} == {((0, 3),)}
    feed = Parts([work_of(ALL[::2], begun)], 2)
    left = make_engine(folder, max_num_seqs=2).stream(feed, sampling)
    assert [key_of(one) for one in left] == [key_of(one) for one in begun]
    assert [len(one.response_ids) for one in left[:2]] == [6, 6]
    assert all(one is old for one, old in zip(left[2:], begun[2:], strict=True))
    assert feed.waiting == [0, 8 + 5] and not feed.whole


def test_none_is_lost_or_doubled_whatever_is_stopped_when(monkeypatch, cheap):
    """Each run hands out in three parts some of what has not begun, and what goes on; some is too old and begins anew."""
    expected, num_calls, num_left = undisturbed(cheap), 0, 0
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        monkeypatch.setattr(streaming, "PULSE", rng.choice((1, 2, 4, 8)))
        whole, begun = [], []
        while begun or not_begun(whole):
            begun = [one for one in begun if rng.random() < 0.9]
            new = [(rng.randrange(4), sample) for sample in not_begun(whole, begun)]
            old = [(rng.randrange(3), one) for one in begun]
            parts = [
                work_of([one for at, one in new if at == i], [one for at, one in old if at == i]) for i in range(3)
            ]
            feed = Parts(parts, rng.choice((None, 2, 3, 4, 6)))
            left = cheap.stream(feed, SAMPLING)
            late = [one for part in feed.parts for work in part for one in work.begun]
            whole, begun = [*whole, *feed.whole], [*left, *late]
            assert len({key_of(one) for one in [*whole, *begun]}) == len(whole) + len(begun)
            assert {key_of(one) for one in whole} >= {key_of(one) for _, one in old} - {key_of(one) for one in begun}
            num_calls, num_left = num_calls + 1, num_left + len(left)
        assert_same(whole, expected)
    assert num_calls > 3 * NUM_SCHEDULES and num_left > 5 * NUM_SCHEDULES


# told to stop, and what cannot be -------------------------------------------------------------------------------------


def test_one_that_was_told_to_stop_samples_no_more_and_asks_until_it_may_leave(folder):
    engine, feed = make_engine(folder), Parts([work_of(ALL[:4]), [], work_of(ALL[4:])], 9)
    engine.told_to_stop = lambda: feed.num_pulses > 1
    assert engine.stream(feed, replace(SAMPLING, ignore_eos=True)) == []
    assert feed.num_pulses == 9
    assert engine.stats()["decode_steps"] <= 2 * streaming.PULSE
    engine.told_to_stop = lambda: False
    feed = Parts([work_of(ALL)])
    assert engine.stream(feed, SAMPLING) == []
    assert_same(feed.whole, undisturbed(engine))


def test_it_refuses_what_cannot_go_on(folder, engine):
    prompt = PROMPTS[0]

    def go_on(sampling=SAMPLING, of=engine, **fields):
        begun = replace(Begun(prompt, 1, (1, 2), (-1.0, -2.0), ((0, 2),)), **fields)
        of.stream(Parts([[Work(prompt, (), (begun,))]]), sampling)

    go_on()
    with pytest.raises(RuntimeError, match="sample 1 of prompt 10, which was begun, has 0 tokens; .* from 1 to 13"):
        go_on(response_ids=(), rollout_logprobs=(), version_runs=())
    with pytest.raises(RuntimeError, match="log-probabilities of 1, and versions of 2"):
        go_on(rollout_logprobs=(-1.0,))
    with pytest.raises(RuntimeError, match="log-probabilities of 2, and versions of 3"):
        go_on(version_runs=((0, 2), (1, 1)))
    with pytest.raises(RuntimeError, match="known of 0 of them"):
        go_on(replace(SAMPLING, with_support=True, **CUT))
    with pytest.raises(UserError, match="vocabulary"):
        go_on(response_ids=(1, 99))
    with pytest.raises(UserError, match="max_num_batched_tokens=4, and is read in one pass"):
        go_on(of=make_engine(folder, enable_chunked_prefill=False, max_num_batched_tokens=4))
    with pytest.raises(UserError, match=r"65 tokens; the engine takes 64\. Raise rollout\.prompt_length"):
        engine.stream(Parts([[Work(make_prompts([65])[0], (0,))]]), SAMPLING)
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        go_on()
    engine.wake()
    go_on()


def test_experts_are_recorded_of_what_becomes_whole_and_nothing_else_may_stop(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2", model_type="qwen3_moe", **EXPERTS["qwen3_moe"])
    engine = make_engine(folder, enable_rollout_routing_replay=True)
    expected, feed = undisturbed(engine), Parts([work_of(ALL[:4]), work_of(ALL[4:])])
    assert engine.stream(feed, SAMPLING) == []
    assert_same(feed.whole, expected)
    recorded = {key_of(one): one.routed_experts for one in expected}
    assert all(torch.equal(one.routed_experts, recorded[key_of(one)]) for one in feed.whole)
    with pytest.raises(RuntimeError, match="enable_rollout_routing_replay=false"):
        engine.stream(Parts([work_of(ALL)], 2), SAMPLING)
    begun = make_engine(folder).stream(Parts([work_of(ALL)], 2), SAMPLING)
    with pytest.raises(RuntimeError, match="enable_rollout_routing_replay=false"):
        engine.stream(Parts([work_of([], begun)]), SAMPLING)


def test_an_engine_that_only_generates_streams_whole_responses(engine):
    feed = Parts([work_of(ALL[:4]), [], [*work_of(ALL[4:6]), *work_of(ALL[6:9])], work_of(ALL[9:])])
    assert RolloutEngine.stream(engine, feed, SAMPLING) == []
    assert_same(feed.whole, undisturbed(engine))
    assert set(feed.waiting) == {0}
    begun = engine.stream(Parts([work_of(ALL)], 2), SAMPLING)
    with pytest.raises(RuntimeError, match=rf"{len(begun)} samples are to go on.*rollout\.name=native"):
        RolloutEngine.stream(engine, Parts([work_of([], begun)]), SAMPLING)


# ranks ----------------------------------------------------------------------------------------------------------------


def _on_ranks_of_a_replica(folder, sampling, settings):
    engine = make_engine(folder, tp_group=dist.group.WORLD, **settings)
    streaming.PULSE, usual = 3, streaming.PULSE
    whole, left = disturbed(engine, sampling)
    streaming.PULSE = usual
    return whole, left


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_two_ranks_of_a_replica_stop_and_go_on_alike(folder, engine, cut):
    sampling = replace(SAMPLING, with_support=bool(cut), **cut)
    (whole, left), (other, other_left) = run_ranks(2, _on_ranks_of_a_replica, folder, sampling, NARROW)
    assert [r.support is None for r in other] == [True] * len(other)  # of the first rank's alone
    assert other == whole and other_left == left
    assert any(left)
    assert_same(whole, undisturbed(engine, sampling), LOGPROB_ATOL)


class Shared(Feed):
    """The queue of all replicas: the next goes to the replica that has the fewest; stop once `enough` are whole.

    What a replica says is heard by all at the same pulse.
    """

    def __init__(self, queue, enough, most, delay):
        self.queue, self.enough, self.most, self.delay = list(queue), enough, most, delay
        self.has, self.log = [0] * dist.get_world_size(), []

    def pulse(self, finished, num_waiting):
        self.delay()
        heard = gathered(([exact(one) for one in finished], num_waiting))
        self.log.append(heard)
        self.has = [has - len(whole) for has, (whole, _) in zip(self.has, heard, strict=True)]
        self.enough -= sum(len(whole) for whole, _ in heard)
        if self.enough <= 0:
            return None
        mine = []
        while self.queue and min(self.has) < self.most:
            rank = self.has.index(min(self.has))
            self.has[rank] += 1
            one = self.queue.pop(0)
            mine += [one] * (rank == dist.get_rank())
        new = [one for one in mine if not isinstance(one, Begun)]
        return work_of(new, [one for one in mine if isinstance(one, Begun)])


def gathered(one):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, one)
    return found


def _on_replicas(folder, seed):
    """Rounds that end when five samples more are whole, the others going on first; delays by `seed`."""
    engine, rng = make_engine(folder, max_num_seqs=3), random.Random(100 * seed + dist.get_rank())
    decode = engine._decode_eagerly

    def delay():
        time.sleep(rng.choice((0, 0, 0.001, 0.005)) if seed else 0)

    def late(batch, length):
        delay()
        return decode(batch, length)

    engine._decode_eagerly = late
    whole, rounds, begun = [], [], []
    while len(whole) < len(ALL):
        known = {one[:2] for one in whole} | {key_of(one) for one in begun}
        queue = [*begun, *((prompt, sample) for prompt, sample in ALL if (prompt.uid, sample) not in known)]
        feed = Shared(queue, min(5, len(ALL) - len(whole)), 4, delay)
        lefts = gathered(engine.stream(feed, SAMPLING))
        late_ones = [one for one in feed.queue if isinstance(one, Begun)]
        begun = sorted([one for left in lefts for one in left] + late_ones, key=key_of)
        whole += [one for heard in feed.log for found, _ in heard for one in found]
        rounds.append((feed.log, [[exact(one) for one in left] for left in lefts]))
    return whole, rounds


def test_replicas_that_share_a_queue_do_the_same_whatever_is_late(folder, engine):
    expected = run_ranks(2, _on_replicas, folder, 0)
    (whole, rounds), other = expected
    assert other == (whole, rounds)
    assert len(rounds) == 3 and all(all(lefts) for _, lefts in rounds[:2])
    samples = {key_of(r): tuple(r.response_ids) for r in undisturbed(engine)}
    assert sorted(one[:2] for one in whole) == sorted(samples)
    assert all(samples[one[:2]] == one[2] for one in whole)
    for seed in (1, 2, 3):
        assert run_ranks(2, _on_replicas, folder, seed) == expected
