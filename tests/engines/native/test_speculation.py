"""Drafts change how fast tokens come, never which ones: every bit of a rollout is that of a run without them."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.config.config import SpeculativeConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.native import drafting, streaming_generation
from mrl.engines.native.decode_cost_model import ASSUMED, Costs, from_stored
from mrl.engines.native.drafting import NOT_HERE, Drafting
from mrl.engines.native.ngram_history import SEQUENCES_PER_ROW, History
from mrl.engines.native.speculation import Speculation
from mrl.types import Prompt
from tests.engines.native.streams import ALL, NARROW, SAMPLING, Parts, disturbed, exact, undisturbed, work_of
from tests.engines.native.test_experts import FAMILIES as EXPERTS
from tests.engines.native.test_multiturn import SAMPLING as TALKED
from tests.engines.native.test_multiturn import conversations
from tests.engines.native.tiny import make_checkpoint, make_engine
from tests.observed import course
from tests.ranks import run_ranks

pytestmark = pytest.mark.compiler

CHEAP = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 12}
ON = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = (
    {"speculative": ON},
    {"speculative": replace(ON, num_speculative_tokens=1, prompt_lookup_max=1), "max_num_seqs": 4},
    {"speculative": replace(ON, num_speculative_tokens=5, prompt_lookup_min=2), "max_num_batched_tokens": 40},
    {"speculative": replace(ON, num_speculative_tokens=20), "enable_prefix_caching": False, "max_num_seqs": 3},
)


@pytest.fixture(autouse=True, scope="module")
def longer_steps_cost_nothing():
    """So that all that is drafted is fed, right or wrong."""
    usual = Drafting._measured, drafting.ASSUMED
    Drafting._measured = lambda self, _: Costs(np.ones(self._most + 1), 0.0, 0.0)
    drafting.ASSUMED = {"steps": [[1, 1], [2, 1]], "slot": 0.0, "drafts": 0.0}
    yield
    Drafting._measured, drafting.ASSUMED = usual


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Of a model whose text repeats: dtype -> without drafts, and the `SETTINGS`."""
    folder = make_checkpoint(tmp_path_factory.mktemp("cheap"), "qwen2", **CHEAP)
    letters = "abcdefghijkl"
    made = {"decode": lambda ids: "".join(letters[i] for i in ids), "response_length": 40}
    return {dtype: [make_engine(folder, dtype=dtype, **made, **one) for one in ({}, *SETTINGS)] for dtype in DTYPES}


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40, derandomize=True)
@given(st.data())
def test_rollouts_are_those_without_drafts_to_the_bit(engines, data):
    plain, *others = engines[data.draw(st.sampled_from(DTYPES))]
    engine = data.draw(st.sampled_from(others))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    text = random.Random(data.draw(st.integers(0, 99)))
    prompts = [Prompt(i, tuple(text.randrange(12) for _ in range(length)), "") for i, length in enumerate(lengths)]
    greedy = data.draw(st.booleans())
    sampling = SamplingConfig(
        n=1 if greedy else data.draw(st.integers(1, 4)),
        max_tokens=data.draw(st.integers(1, 40)),
        greedy=greedy,
        temperature=data.draw(st.sampled_from((0.1, 0.4, 1.0))),
        top_k=data.draw(st.sampled_from((-1, 5))),
        top_p=data.draw(st.sampled_from((1.0, 0.8))),
        return_kept_tokens=data.draw(st.booleans()),
        stop_token_ids=data.draw(st.sampled_from(((), (3,), (1, 4, 9)))),
        stop=data.draw(st.sampled_from(((), ("ab", "ccc"), ("fgf", "d")))),
        seed=data.draw(st.integers(0, 5)),
    )
    expected = plain.generate(prompts, sampling)
    found = engine.generate(prompts, sampling)
    assert [exact(one) for one in found] == [exact(one) for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]


def test_text_that_repeats_takes_fewer_steps_and_what_was_drafted_is_told(engines):
    plain, engine, *_ = engines[torch.float32]
    sampling = SamplingConfig(n=4, max_tokens=40, temperature=0.2, ignore_eos=True)
    for each in (plain, engine):
        each.generate([Prompt(0, (1, 2, 3), "")], sampling)
    without, stats = plain.stats(), engine.stats()
    assert stats["decode_steps"] < 0.5 * without["decode_steps"]
    assert stats["decode_tokens"] == without["decode_tokens"]
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert without.keys() == stats.keys() - {"drafted_tokens", "accepted_tokens"}


# many ranks, experts --------------------------------------------------------------------------------------------------

RECORD = {"enable_rollout_routing_replay": True, "max_num_seqs": 5}
DRAWN = SamplingConfig(n=3, max_tokens=30, temperature=0.3, top_p=0.95, stop_token_ids=(5, 6), seed=2)


def _on_ranks(folder, dtype, speculative):
    made = Drafting._measured
    Drafting._measured = lambda self, _: Costs(np.ones(self._most + 1), 0.0, 0.0)
    try:
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        ep = {"expert_parallel_size": 2} if group is not None else {}
        engine = make_engine(folder, dtype=dtype, tp_group=group, speculative=speculative, **RECORD, **ep)
        prompts = [Prompt(i, tuple(range(1 + i, 5 + 3 * i)), "") for i in range(3)]
        rollouts = engine.generate(prompts, DRAWN)
        return [(exact(one), one.routed_experts.tolist()) for one in rollouts], engine.stats().get("accepted_tokens")
    finally:
        Drafting._measured = made


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3_moe", 1), ("qwen2_moe", 1), ("qwen2_moe", 2)])
def test_experts_and_two_ranks_of_a_replica(tmp_path_factory, family, num_ranks):
    folder = make_checkpoint(tmp_path_factory.mktemp(family), "qwen2", model_type=family, **EXPERTS[family])
    for dtype in DTYPES:
        calls = [(folder, dtype, speculative) for speculative in (SpeculativeConfig(), ON)]
        if num_ranks == 1:
            (expected, _), (found, accepted) = [_on_ranks(*call) for call in calls]
        else:
            (plain, _), (drafted, other) = [run_ranks(2, _on_ranks, *call) for call in calls]
            (expected, _), (found, accepted) = plain, drafted
            assert other == drafted
        assert found == expected and accepted > 0


# work that comes in parts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", initializer_range=0.4)


LOW = replace(SAMPLING, temperature=0.05, max_tokens=30, stop_token_ids=(5,))


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "return_kept_tokens": True}], ids=["whole", "cut"])
def test_a_stream_gives_the_same_bits_and_the_same_order_every_time(folder, cut):
    sampling = replace(LOW, **cut)
    parts = [work_of(ALL[:7]), [], work_of(ALL[7:])]
    plain, engine = (make_engine(folder, speculative=one, **NARROW) for one in (SpeculativeConfig(), ON))
    feeds = []
    for each in (plain, engine, engine):
        feeds.append(Parts(parts))
        assert each.generate_streaming(feeds[-1], sampling) == []
    assert sorted(map(exact, feeds[0].whole)) == sorted(map(exact, feeds[1].whole))
    assert engine.stats()["accepted_tokens"] > 0
    assert [exact(one) for one in feeds[1].whole] == [exact(one) for one in feeds[2].whole]
    assert feeds[1].waiting == feeds[2].waiting


def test_samples_that_stop_and_go_on_are_a_function_of_config_and_seed(folder, monkeypatch):
    """As with `over_sample_rate`: a stream takes no costs that a clock has measured, and stops at the same tokens."""
    monkeypatch.setattr(Drafting, "_measured", lambda *_: pytest.fail("a stream's drafts depend on a clock"))
    monkeypatch.setattr(streaming_generation, "MAX_POLL_INTERVAL", 3)
    found, accepted = [], []
    for delay_s in (0.0, 0.003):
        engine = make_engine(folder, speculative=ON, **NARROW)

        def between(_, engine=engine, delay_s=delay_s):
            time.sleep(delay_s)
            accepted.append(engine.stats()["accepted_tokens"])

        whole, left = disturbed(engine, LOW, last=4, between=between)
        assert max(accepted) > 5
        found.append(([exact(one) for one in whole], [[exact_begun(one) for one in part] for part in left]))
    assert found[0] == found[1] and any(found[0][1])
    plain = {one[:2]: one[2] for one in map(exact, undisturbed(make_engine(folder, **NARROW), LOW))}
    assert {one[:2]: one[2] for one in found[0][0]} == plain


def _streams_on_ranks(folder):
    usual = streaming_generation.MAX_POLL_INTERVAL, drafting.ASSUMED
    streaming_generation.MAX_POLL_INTERVAL, drafting.ASSUMED = (
        3,
        {"steps": [[1, 1], [2, 1]], "slot": 0.0, "drafts": 0.0},
    )
    try:
        accepted, engine = [], make_engine(folder, tp_group=dist.group.WORLD, speculative=ON, **NARROW)

        def between(_):
            accepted.append(engine.stats()["accepted_tokens"])

        whole, left = disturbed(engine, LOW, last=4, between=between)
        plain = undisturbed(make_engine(folder, tp_group=dist.group.WORLD, **NARROW), LOW)
    finally:
        streaming_generation.MAX_POLL_INTERVAL, drafting.ASSUMED = usual
    told = [exact(one) for one in whole], [[exact_begun(one) for one in part] for part in left], accepted
    return told, [exact(one)[:3] for one in plain]


@pytest.mark.slow
def test_two_ranks_of_a_replica_draft_alike_and_stop_at_the_same_tokens(folder):
    (first, plain), (second, _) = run_ranks(2, _streams_on_ranks, folder)
    assert first == second and sum(first[2]) > 0 and any(first[1])
    assert sorted(one[:3] for one in first[0]) == sorted(plain)


def exact_begun(one):
    return one.prompt.uid, one.sample_index, one.response_ids, one.rollout_logprobs


@pytest.mark.parametrize("rows", [None, 5])
def test_conversations_have_the_same_tokens_and_the_same_bits_every_time(folder, rows):
    sampling = replace(TALKED, temperature=0.05)
    plain, _, _ = conversations(folder, rows=rows, sampling=sampling)
    found, stats, _ = conversations(folder, rows=rows, sampling=sampling, speculative=ON)
    again, _, _ = conversations(folder, rows=rows, sampling=sampling, speculative=ON, seed=1)
    assert stats["accepted_tokens"] > 0
    assert found == again
    if rows is None:  # where no place in the cache is given up, no token is read in other company
        assert found == plain
    assert [one[:3] for one in found] == [one[:3] for one in plain]


# drafts ---------------------------------------------------------------------------------------------------------------


def drafts_of(own, others, least, most, drafted):
    """What `drafts.c` says, slowly; `others` with the place where their own tokens begin."""
    votes = {}
    for length in range(min(most, len(own)), least - 1, -1):
        for ids, begins in [(own, 0), *others]:
            for i in reversed(range(begins, len(ids) - 1)):
                if i + 1 >= length and ids[i + 1 - length : i + 1] == own[len(own) - length :]:
                    count, place = votes.get(ids[i + 1], (0, (ids, i + 1)))
                    votes[ids[i + 1]] = (count + 1, place)
        if votes:
            _, (ids, place) = max(votes.values(), key=lambda found: found[0])
            said = list(ids[place:])
            while ids is own and len(said) < drafted:
                said.append(said[len(said) - (len(own) - place)])
            return said[:drafted], length
    return [], 0


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.data())
def test_drafts_follow_the_longest_end_and_what_came_most_often(engines, data):
    operations = engines[torch.float32][1]._model.operations
    sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)
    own, others = data.draw(sequences), data.draw(st.lists(sequences, max_size=3))
    least = data.draw(st.integers(1, 3))
    most, drafted = data.draw(st.integers(least, 5)), data.draw(st.integers(1, 9))
    history = History(4, 4, 64)
    prompt = data.draw(st.integers(0, min(map(len, [own, *others]))))
    for row, ids in enumerate([own, *others]):
        history.begin(row, 7, row, ids, prompt)
    drafts = torch.zeros(1, drafted, dtype=torch.int64)
    counts, matched = operations.draft(history, history.slots(1), torch.tensor([99]), range(least, most + 1), drafts)
    family = [(ids, prompt) for ids in others]
    found, length = drafts_of(own, family, least, most, drafted)
    assert (int(matched), int(counts)) == (length, len(found))
    if len(others) < 2:  # with more, the order of equally frequent ones is that of the circle
        assert drafts[0, : len(found)].tolist() == found
    assert operations.draft(history, history.slots(1), torch.tensor([0]), range(1, 3), drafts)[0].tolist() == [0]


def test_ended_sequences_are_forgotten_in_turn_and_a_member_that_goes_on_replaces_itself():
    history = History(1, 1, 8)
    for member in range(SEQUENCES_PER_ROW):
        history.begin(0, 0, member, [member], 1)
        history.end(0)
    assert sorted(ids for ids, *_ in history.tokens_HW.tolist()) == [0, 1, 2, 3]
    history.begin(0, 0, 2, [7], 1)
    assert sorted(ids for ids, *_ in history.tokens_HW.tolist()) == [0, 1, 3, 7]
    history.end(0)
    history.begin(0, 1, 0, [8], 1)
    assert sorted(ids for ids, *_ in history.tokens_HW.tolist()) == [1, 3, 7, 8]
    assert sorted(history.next_H.tolist()) == [0, 1, 2, 3]


# whether they pay -----------------------------------------------------------------------------------------------------


def speculation_of(engines, batch):
    """Of rows in which something is drafted, at the costs that are assumed."""
    engine = engines[torch.float32][1]
    config = SpeculativeConfig(method="ngram")
    spec = Speculation(
        config, engine._model.operations, History(1, 1, 8), from_stored(ASSUMED, 4096), batch, lambda _: None
    )
    counts = np.full(batch, config.num_speculative_tokens)
    return spec, (counts, np.full(batch, 3), np.full(batch, 100))


@pytest.mark.parametrize(("batch", "fewest"), [(1, 3), (8, 1), (16, 1)])
def test_few_rows_draft_and_what_does_not_come_true_is_drafted_no_more(engines, batch, fewest):
    spec, rows = speculation_of(engines, batch)
    spec._rates[:] = 0.9
    assert spec._chosen(*rows).min() >= fewest
    spec._rates[:] = 0.02
    assert spec._chosen(*rows) is None


def test_many_rows_draft_nothing(engines):
    spec, rows = speculation_of(engines, 400)
    spec._rates[:] = 0.9
    assert spec._chosen(*rows) is None


def test_a_step_has_no_more_tokens_than_its_costs_tell_of(engines):
    engine = engines[torch.float32][1]
    costs = Costs(np.ones(13), 0.0, 0.0)
    spec = Speculation(ON, engine._model.operations, History(1, 1, 8), costs, 10, lambda _: None)
    assert spec._chosen(np.full(10, 8), np.full(10, 3), np.full(10, 100)).sum() == 2


def test_acceptance_is_learned_where_nothing_is_fed(engines):
    spec, _ = speculation_of(engines, 2)
    for _ in range(200):
        spec._found = (np.array([4, 4]), np.array([3, 5]), np.array([1, 1]))
        spec.update_rates(np.array([1, 2]))
    assert spec._rates[3] > 0.9 and spec._rates[5] < 0.1 and spec._rates[4] == 0.5


def test_forty_drafts_that_did_not_come_true_end_drafting_until_some_do(engines):
    spec, rows = speculation_of(engines, 1)
    for drawn, drafts in ((2, False), (1, True)):
        for _ in range(40):
            spec._found = (np.array([1]), np.array([3]), np.array([1]))
            spec.update_rates(np.array([drawn]))
        assert (spec._chosen(*rows) is not None) == drafts


def test_without_compiled_operations_nothing_is_drafted_and_that_is_told(folder):
    engine = make_engine(folder, speculative=ON, enforce_eager=True)
    assert engine.notes == (NOT_HERE,)
    engine.generate([Prompt(0, (1, 2, 3), "")], SamplingConfig(n=1, max_tokens=4))
    assert "drafted_tokens" not in engine.stats()


# whole runs -----------------------------------------------------------------------------------------------------------

DRAFTS = ("rollout.speculative.method=ngram", "rollout.speculative.prompt_lookup_min=1")


def numbers(facts):
    """Of each step, but what its work was."""
    return {
        name: value
        for name, value in facts.items()
        if not any(word in name for word in ("engine", "operators", "perf/"))
    }


def test_a_run_has_the_same_numbers_with_drafts():
    steps = ("train.num_steps=3",)
    plain, drafted = course(*steps), course(*steps, *DRAFTS)
    assert numbers(drafted) == numbers(plain) and len(numbers(plain)) > 50
    assert drafted["3 engine drafted_tokens"] > 0


def test_a_run_that_takes_the_first_responses_is_the_same_every_time_with_drafts():
    short = ("train.num_steps=4", "train.batch_size=2", "train.minibatch_size=null", "rollout.max_num_seqs=6")
    given = (*short, "rollout.response_length=40", "rollout.over_sample_rate=1", *DRAFTS)
    first, again = (course.__wrapped__(*given) for _ in range(2))  # not from the cache
    assert "refused" not in first
    assert first == again and first["3 engine accepted_tokens"] > 0
