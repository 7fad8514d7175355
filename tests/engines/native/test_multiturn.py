"""Conversations in one loop: who goes on when, what stays in the cache, and that no clock has a say."""

import random
import time
from collections import deque

import pytest
import torch

from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.engines.native.multiturn import MAX_ACTIVE_RATIO, pool_rows
from mrl.engines.native.paused_sequences import PausedSequences
from mrl.engines.native.scheduler import PrefillGroup, Scheduler
from mrl.types import Prompt
from tests.engines.native.test_converse import ENDS, LENGTHS, Scripted
from tests.engines.native.test_engine import LOGPROB_ATOL
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts
from tests.ranks import run_ranks

SAMPLING = SamplingConfig(n=3, max_tokens=60, temperature=0.9, stop_token_ids=ENDS, seed=2)
CUT = {"top_p": 0.9, "return_kept_tokens": True}
WAITS_S = 0.004


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


class Late(Scripted):
    """Each answer takes its own time, by `seed`, and is waited for. It tells what it was asked, in order."""

    def __init__(self, seed):
        super().__init__()
        self.random, self.ready, self.events = random.Random(seed), {}, []

    def submit(self, stopped):
        super().submit(stopped)
        self.ready[stopped.key] = time.monotonic() + self.random.choice((0, 1, 5)) * WAITS_S
        self.events.append(("ask", stopped.key))

    def wait_for_replies(self, keys):
        self.events.append(("answers", *keys))
        time.sleep(max(0.0, max(self.ready[key] for key in keys) - time.monotonic()))
        return super().wait_for_replies(keys)


def conversations(folder, *, rows=None, seed=0, by_rounds=False, sampling=SAMPLING, **settings):
    """Of an engine with so many rows in its cache: what is told of each, and the talk."""
    engine, talk = make_engine(folder, max_num_seqs=4, **settings), Late(seed)
    if rows is not None:
        engine._cache.budget_bytes = rows * engine._cache.row_bytes(max(LENGTHS) + 60)
    converse = RolloutEngine.generate_multi_turn if by_rounds else type(engine).generate_multi_turn
    rollouts = converse(engine, make_prompts(LENGTHS), sampling, talk)
    for rollout in rollouts:
        said = talk.said[rollout.prompt.uid - 10, rollout.sample_index]
        assert list(zip(rollout.response_ids, rollout.sampled_mask, strict=True)) == said
    told = [
        (r.prompt.uid, r.sample_index, r.response_ids, r.rollout_logprobs, r.finish_reason, r.log_kept_mass)
        for r in rollouts
    ]
    return told, engine.stats(), talk


def counts(stats):
    return {name: value for name, value in stats.items() if not name.endswith("_s")}


def assert_same(found, expected):
    assert [(*one[:3], one[4]) for one in found] == [(*one[:3], one[4]) for one in expected]
    for one, other in zip(found, expected, strict=True):
        for place in (3, 5):
            torch.testing.assert_close(torch.tensor(one[place]), torch.tensor(other[place]), atol=LOGPROB_ATOL, rtol=0)


@pytest.mark.parametrize(("rows", "cut"), [(None, {}), (1, {}), (3, {}), (5, {}), (None, CUT), (4, CUT)], ids=str)
def test_tokens_are_those_of_rounds_and_a_small_cache_reads_again(folder, rows, cut):
    sampling = SamplingConfig(**{**vars(SAMPLING), **cut})
    expected, _, _ = conversations(folder, by_rounds=True, sampling=sampling)
    found, stats, talk = conversations(folder, rows=rows, sampling=sampling)
    assert_same(found, expected)
    prompts, observed = sum(LENGTHS), sum(not own for said in talk.said.values() for _, own in said)
    answers = sum(talk.turns.values()) - len(talk.turns)  # with each of them the turn's newest token is read
    assert stats["prefill_tokens"] == prompts + observed + answers + stats["reread_tokens"]
    assert (stats["reread_tokens"] > 0) == (rows is not None)
    assert stats["max_running"] == min(4, rows or 4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 5])
def test_late_answers_change_no_bit(folder, rows):
    expected, stats, talk = conversations(folder, rows=rows)
    for seed in range(1, 4):
        found, others, other = conversations(folder, rows=rows, seed=seed)
        assert found == expected
        assert counts(others) == counts(stats)
        assert other.events == talk.events


def test_no_answer_is_asked_for_before_others_took_their_turns(folder):
    _, _, talk = conversations(folder)
    asked, waits = {}, []
    for number, (what, *keys) in enumerate(talk.events):
        turns = sum(event[0] == "ask" for event in talk.events[:number])
        if what == "ask":
            asked[keys[0]] = turns
        else:
            waits += [turns - asked[key] for key in keys]
    assert [key for what, *keys in talk.events if what == "answers" for key in keys][:6] == [
        keys[0] for what, *keys in talk.events if what == "ask"
    ][:6]
    assert sum(waits) / len(waits) > 3  # of 12 conversations in 4 rows


def test_no_more_conversations_begin_than_are_of_use(folder):
    talk = Late(0)
    engine = make_engine(folder, max_num_seqs=1)
    engine.generate_multi_turn(
        make_prompts([3] * 9), SamplingConfig(n=1, max_tokens=60, stop_token_ids=ENDS, seed=2), talk
    )
    ends = {key: i for i, (what, *keys) in enumerate(talk.events) if what == "answers" for key in keys}
    begins = {}
    for i, (what, *keys) in enumerate(talk.events):
        if what == "ask":
            begins.setdefault(keys[0], i)
    most = max(sum(begins[key] <= at <= ends[key] for key in begins) for at in begins.values())
    assert most == MAX_ACTIVE_RATIO


def test_one_that_was_told_to_stop_gives_nothing(folder):
    engine, talk = make_engine(folder, max_num_seqs=4), Late(0)
    engine.abort_requested = lambda: len(talk.events) > 8
    assert engine.generate_multi_turn(make_prompts(LENGTHS), SAMPLING, talk) == []
    engine.abort_requested = lambda: False
    assert len(engine.generate_multi_turn(make_prompts(LENGTHS), SAMPLING, Late(0))) == len(LENGTHS) * SAMPLING.n


def test_rows_to_wait_in_come_in_steps_where_memory_is_short():
    assert pool_rows(8, 3, 2, 100) == 7
    assert pool_rows(8, 50, 2, 100) == 8 * MAX_ACTIVE_RATIO + 2
    assert {pool_rows(8, 100, 1, fitting) for fitting in range(8, 25)} == {8, 10, 12, 14, 16, 18, 20, 22, 24}
    assert pool_rows(1, 1, 1, 100) == 1


def _on_a_rank(folder, rows):
    found, stats, _ = conversations(folder, rows=rows, tp_group=torch.distributed.group.WORLD)
    return found, counts(stats)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 5])
def test_two_ranks_go_on_alike(folder, rows):
    first, second = run_ranks(2, _on_a_rank, folder, rows)
    assert first == second
    expected, stats, _ = conversations(folder, rows=rows)
    assert_same(first[0], expected)
    assert (first[1]["reread_tokens"] > 0) == (stats["reread_tokens"] > 0)


# rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("spare", [0, 1, 3, 30])
@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_finds_in_its_row_what_it_left(num_rows, spare, seed):
    """Against a model of the cache: `held` says whose tokens each row's slots have."""
    rng = random.Random(seed)
    prompts = [Prompt(uid=i, prompt_ids=tuple(range(n)), text="") for i, n in enumerate([3, 1, 7, 4, 2])]
    parking = PausedSequences(num_rows + spare)
    scheduler = Scheduler(prompts, 3, num_rows, room=9, share_prefill=True, parking=parking)
    held, queue, turns, step, lost = {}, [], {}, 0, 0

    def move(moves):
        for one in moves:
            assert max(one.source, one.target) < num_rows + spare
            held[one.target] = held[one.source][: one.length]

    while not scheduler.done or queue:
        admitted = scheduler.admit(rng.randrange(1, 9))
        free = (
            num_rows - len(scheduler.running) - scheduler.num_prefilled_waiting - sum(len(g.pending) for g in admitted)
        )
        keys = queue[: rng.randint(0, max(0, free)) if scheduler.running or admitted else free]
        queue = queue[len(keys) :]
        for key in [key for key in keys if rng.random() < 0.2]:
            keys.remove(key)
            parking.forget(key)
        groups = [
            PrefillGroup(0, Prompt(0, tuple(range(len(turns[key]) + 3)), ""), deque([0]), 9, resumed_key=key)
            for key in keys
        ]
        move(scheduler.resume(groups, admitted))
        for i, group in enumerate([*groups, *admitted]):
            row = len(scheduler.running) + i
            if group.resumed_key:
                assert group.cached in (0, len(turns[group.resumed_key]))
                lost += group.cached == 0
                assert not group.cached or held[row][: group.cached] == turns[group.resumed_key]
                held[row] = [*turns[group.resumed_key], *([group.resumed_key] * 3)]
            else:
                held[row] = [("prompt", group.index)] * group.prompt_len
        begun, moves = scheduler.start([*groups, *admitted], step)
        move(moves)
        for row in range(len(scheduler.running)):
            sample = scheduler.running[row]
            if row in begun:
                held[row] = held[row][: sample.group.prompt_len]
            assert len(held[row]) == sample.num_cached(step)
            held[row].append(sample.key)
        step += 1
        ended = [row for row in range(len(scheduler.running)) if rng.random() < 0.5]
        waiting = {row: scheduler.running[row].key for row in ended if rng.random() < 0.8}
        for row, key in waiting.items():
            turns[key] = list(held[row])
        queue += sorted(waiting.values())
        begun, moves = scheduler.retire(ended, step, waiting)
        move(moves)
        for row in begun:
            held[row] = held[row][: scheduler.running[row].group.prompt_len]
    assert (lost == 0) >= (spare == 30)
    assert turns and not parking._places
