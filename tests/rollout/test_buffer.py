"""What is in flight: never more than the gate lets in, nothing lost, nothing twice, no token older than it may be."""

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.rollout.buffer import RolloutBuffer
from mrl.trainer.training_state import malformed_state_is_user_error
from mrl.types import PartialRollout, Prompt, Rollout, SampleTable
from tests.checkpoint.run_dir.test_commit_fuzz import change_value

SAMPLES = 2
RANKS = ParallelLayout(2)
"""Two replicas of one rank each."""


def prompt_at(uid):
    return Prompt(uid, (uid % 7,), f"p{uid}", source=f"data:{uid}", data_source="set")


def row(rollout, rank):
    """Of the table."""
    facts = dict.fromkeys(SampleTable.FACTS, 0.0)
    versions = [version for version, _ in rollout.versions]
    return list(
        (
            facts
            | {
                "rank": rank,
                "uid": rollout.prompt.uid,
                "sample_index": rollout.sample_index,
                "response_len": len(rollout.response_ids),
                "reward": rollout.reward,
                "version": versions[-1],
                "oldest_version": versions[0],
                "num_versions": len(versions),
                "end": -1,
            }
        ).values()
    )


class Run:
    """A run's schedule on two ranks, with an engine that makes of each round what a seed says.

    Attributes:
        flights: Of each rank; they must always agree.
        drawn: Prompts so far.
        taken: Uids of each step's groups.
        dropped: Uids of groups with nothing to learn from.
        ages: Age of the oldest token of each step.
    """

    def __init__(self, schedule, seed, *, dynamic):
        self.plan, self.draw, self.dynamic = schedule, random.Random(seed), dynamic
        self.flights = [RolloutBuffer(schedule, prompt_at) for _ in range(RANKS.world_size)]
        self.drawn, self.taken, self.dropped, self.ages = 0, [], set(), []
        self.version = self.done = self.restarted = 0

    def step(self, step):
        """As `train.reinforcement_step`."""
        self.each(lambda flight: flight.record_policy_version(self.version, step - 1))
        if self.flights[0].num_missing or not self.plan.lead:
            self.sample(step, beside=False)
        self.take(step)
        self.done = step
        if self.plan.lead:
            self.sample(step + 1, beside=True)
        self.version += 1 + step % 2
        self.check(step)

    def each(self, work):
        found = [work(flight) for flight in self.flights]
        assert all(one == found[0] for one in found)
        return found[0]

    def check(self, step):
        """What holds at every moment."""
        states = [flight.state_dict() for flight in self.flights]
        assert states[0] == states[1] and json.loads(json.dumps(states[0]))
        in_flight = {group["uid"] for group in states[0]["groups"]}
        done_with = [uid for uids in self.taken for uid in uids]
        assert len(set(done_with)) == len(done_with), "a group was trained on twice"
        assert not in_flight & {*done_with, *self.dropped}
        assert in_flight | {*done_with, *self.dropped} == set(range(self.drawn)), "a group was lost"
        v = self.done if step > self.done else self.done - 1  # steps in the weights that sample
        most = (self.plan.lead + v + 1) * self.plan.batch_size + self.plan.extra
        assert len(done_with) + len(in_flight) <= most
        assert len(in_flight) <= self.plan.max_in_flight

    def sample(self, step, *, beside):
        """As `train.sample`."""
        steps, ahead = (step - 2 if beside else step - 1), beside
        before = self.flights[0].tally.restarted
        self.each(lambda flight: flight.restart_too_old(step))
        self.restarted += self.flights[0].tally.restarted - before
        for _ in range(3 if self.dynamic else 1):
            room = self.each(lambda flight: flight.num_drawable(step, concurrent=beside))
            prompts = [prompt_at(uid) for uid in range(self.drawn, self.drawn + room)]
            self.drawn += room
            self.each(partial(RolloutBuffer.draw, prompts=prompts))
            self.check(step)
            groups = self.each(lambda flight: flight.unfinished(step, concurrent=beside))
            if not groups:
                return
            self.round([group.uid for group in groups], step, steps, ahead)
            self.check(step)
            ahead = False
            if not self.each(lambda flight: flight.num_missing):
                return

    def round(self, uids, step, steps, ahead):
        """Completes some groups in any order, as `rollout/partial_rollout.py` does where sampling stops early."""
        home = {group["uid"]: group["replica"] for group in self.flights[0].state_dict()["groups"]}
        home = {uid: self.draw.randrange(2) if home[uid] is None else home[uid] for uid in uids}
        order, whole, begun = self.draw.sample(uids, len(uids)), [], {}
        while True:
            enough = self.each(partial(RolloutBuffer.may_stop, newly_complete=whole, step=step, ahead=ahead))
            if not order or (enough and self.plan.by_parts):
                break
            count = self.draw.randint(1, len(order))
            whole, order = whole + order[:count], order[count:]
        for uid in order:
            begun[uid] = self.draw.random() < 0.8 or any(uid in flight.partial_rollouts for flight in self.flights)
        rows, left = [], {uid: home[uid] for uid in order if begun[uid]}
        made = []
        for rank, flight in enumerate(self.flights):
            mine = [self.grown(flight, uid, whole=True) for uid in whole if home[uid] == rank]
            parts = {uid: self.grown(flight, uid, whole=False) for uid in left if home[uid] == rank}
            flight.partial_rollouts = {
                uid: found for uid, found in flight.partial_rollouts.items() if uid not in uids
            } | parts
            made.append([rollout for group in mine for rollout in group])
            rows += [row(rollout, rank) for rollout in made[-1]]
        turns = {(one.prompt.uid, one.sample_index): [float(one.prompt.uid)] for part in made for one in part}
        rows_NC = torch.tensor(rows, dtype=torch.float64).view(-1, len(SampleTable.FACTS))
        table = SampleTable(SampleTable.FACTS, rows_NC, turns)
        held = [(uid, at, *self.flights[at].local_size(uid)) for uid, at in left.items()]
        self.each(lambda flight: flight.mark_partial(held, steps))
        teaching = table
        if self.dynamic:
            good = {uid for uid in whole if self.draw.random() < 0.6}
            self.dropped |= {*whole} - good
            teaching = table.keep(torch.tensor([int(uid) in good for uid in table["uid"].tolist()], dtype=torch.bool))
        for flight, rollouts in zip(self.flights, made, strict=True):
            flight.complete(whole, rollouts, table, teaching, steps, RANKS)

    def grown(self, flight, uid, *, whole):
        """The samples of a group on its replica after a round, under the version of now."""
        found = []
        for index in range(SAMPLES):
            (had,) = [one for one in flight.partial_rollouts.get(uid, ()) if one.sample_index == index] or [None]
            runs = ((self.version, 1),) if had is None else (*had.version_runs, (self.version, 1))
            ids = tuple(range(len(runs)))
            if whole:
                found.append(
                    Rollout(prompt_at(uid), index, list(ids), [-1.0] * len(ids), "stop", runs[-1][0], version_runs=runs)
                )
            else:
                found.append(PartialRollout(prompt_at(uid), index, ids, (-1.0,) * len(ids), runs))
        return found

    def take(self, step):
        before = self.flights[0].state_dict()
        taken = [flight.take(step) for flight in self.flights]
        assert torch.equal(taken[0].table.rows_NC, taken[1].table.rows_NC)
        table = taken[0].table
        left = {group["uid"] for group in self.flights[0].state_dict()["groups"]}
        uids = [group["uid"] for group in before["groups"] if group["uid"] not in left]
        self.taken.append(uids)
        if not uids:
            return
        assert set(uids) == set(table["uid"].long().tolist()) == set(taken[0].names)
        assert len(table) == SAMPLES * len(uids) and len(uids) <= self.plan.batch_size
        assert table.turn_rewards == {(uid, sample): [float(uid)] for uid in uids for sample in range(SAMPLES)}
        held = Counter(one.prompt.uid for part in taken for one in part.rollouts)
        assert {uid: held[uid] for uid in uids} == dict.fromkeys(uids, SAMPLES)
        for rank, part in enumerate(taken):  # the table says who has the tokens
            own = {one.prompt.uid for one in part.rollouts}
            assert own >= {int(uid) for uid, at in zip(table["uid"], table["rank"], strict=True) if at == rank}
        flight = self.flights[0]
        worst = max(flight.age_of(int(version), step=step) for version in table["oldest_version"])
        self.ages.append(worst)
        flight.check_age(worst)


def beyond(batch, extra, age):
    """At most a batch where ages have a bound."""
    return extra if age is None else min(extra, batch)


SCHEDULES = st.builds(
    lambda batch, lead, extra, age, waits, parts: (
        RolloutSchedule(batch, SAMPLES, lead=lead, max_age=lead, by_parts=parts)
        if lead is not None
        else RolloutSchedule(
            batch, SAMPLES, extra=beyond(batch, extra, age), max_age=age, waits=waits and age != 0, by_parts=True
        )
    ),
    st.integers(1, 5),
    st.none() | st.integers(0, 4),
    st.integers(1, 20),
    st.none() | st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(schedule=SCHEDULES, seed=st.integers(0, 2**32), dynamic=st.booleans())
def test_nothing_is_lost_or_doubled_or_too_old_and_the_gate_holds(schedule, seed, dynamic):
    run = Run(schedule, seed, dynamic=dynamic)
    for step in range(1, 26):
        run.step(step)
    most = schedule.max_age
    assert most is None or max(run.ages, default=0) <= most
    if not dynamic:
        assert [len(uids) for uids in run.taken] == [schedule.batch_size] * 25
    if schedule.in_order and not dynamic:
        assert [uid for uids in run.taken for uid in uids] == list(range(25 * schedule.batch_size))


@pytest.mark.parametrize("lead", [2, 4])
def test_far_ahead_some_stay_unfinished_for_good_and_as_many_become_whole_as_are_taken(lead):
    run, unfinished = Run(RolloutSchedule(4, SAMPLES, lead=lead, max_age=lead, by_parts=True), 7, dynamic=False), []
    run.draw.randint = lambda low, high: 1
    for step in range(1, 61):
        run.step(step)
        unfinished.append(sum(group["place"] is None for group in run.flights[0].state_dict()["groups"]))
    assert sum(count > 0 for count in unfinished[20:]) > 20
    assert max(unfinished) <= lead * 4 - 4


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_two_hundred_steps_of_over_sampling_reach_the_bound_and_stay_within(waits):
    run = Run(RolloutSchedule(4, SAMPLES, extra=3, max_age=1, waits=waits, by_parts=True), 5, dynamic=True)
    for step in range(1, 201):
        run.step(step)
    assert max(run.ages) == 1 and (run.restarted > 0) is not waits
    assert len(run.dropped) > 50


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(schedule=SCHEDULES, seed=st.integers(0, 2**32), steps=st.integers(1, 6), dynamic=st.booleans())
def test_what_is_told_to_another_is_the_same_and_goes_on_alike(schedule, seed, steps, dynamic):
    run = Run(schedule, seed, dynamic=dynamic)
    for step in range(1, steps + 1):
        run.step(step)
    others = []
    for flight in run.flights:
        other = RolloutBuffer(schedule, prompt_at)
        other.load_state(json.loads(json.dumps(flight.state_dict())), *flight.tables())
        other.replace_samples(*flight.samples(), {0: 0, 1: 1})
        assert other.state_dict() == flight.state_dict()
        for name, rows in flight.tables()[1].items():
            assert torch.equal(rows, other.tables()[1][name])
        assert other.samples() == flight.samples() and other.num_missing == flight.num_missing
        others.append(other)
    state = run.draw.getstate()
    first = Run(schedule, 0, dynamic=dynamic)
    vars(first).update(vars(run) | {"flights": others, "draw": random.Random(0), "taken": [*run.taken]})
    first.draw.setstate(state)
    first.dropped, first.ages = {*run.dropped}, [*run.ages]
    for each in (run, first):
        for step in range(steps + 1, steps + 5):
            each.step(step)
    assert first.taken == run.taken and first.ages == run.ages
    assert first.flights[0].state_dict() == run.flights[0].state_dict()


def whole_run(schedule, orders):
    """Steps whose groups become whole in these orders, one list of uids each."""
    run = Run(schedule, 0, dynamic=False)
    for step, order in enumerate(orders, 1):
        run.draw.sample = lambda uids, count, order=order: (
            [uid for uid in order if uid in uids] + [uid for uid in uids if uid not in order]
        )
        run.draw.randint, run.draw.random = lambda low, high: 1, lambda: 0.0
        run.step(step)
    return run


def test_groups_are_taken_in_the_order_of_their_prompts_or_as_they_become_whole():
    assert whole_run(RolloutSchedule(2, SAMPLES, lead=1, max_age=1), [[3, 2, 1, 0], [5, 4]]).taken == [[0, 1], [2, 3]]
    ends = RolloutSchedule(2, SAMPLES, extra=1, max_age=None, by_parts=True)
    assert whole_run(ends, [[2, 0], [3, 4]]).taken == [[0, 2], [3, 4]]  # 1 is still begun
    waiting = replace(ends, max_age=1)
    assert whole_run(waiting, [[2, 0], [3, 4]]).taken == [[0, 2], [1, 3]]  # it became due, and goes first


def test_a_group_that_becomes_too_old_begins_again_once_and_is_then_waited_for():
    drop = RolloutSchedule(1, SAMPLES, extra=1, max_age=0, waits=False, by_parts=True)
    run = whole_run(drop, [[0], [1], [2]])
    assert run.taken == [[0], [1], [2]] and run.restarted == 2  # 1 began for step 1, and again for step 2
    assert run.ages == [0, 0, 0]


def test_near_the_end_of_the_run_no_more_prompts_begin_than_it_trains():
    run = Run(RolloutSchedule(2, SAMPLES, lead=2, max_age=2, num_steps=3), 0, dynamic=False)
    for step in (1, 2, 3):
        run.step(step)
    assert run.drawn == 6 and not run.flights[0].state_dict()["groups"]


def test_a_token_that_is_too_old_ends_the_run():
    flight = RolloutBuffer(RolloutSchedule(2, SAMPLES, lead=1, max_age=1), prompt_at)
    flight.check_age(1)
    with pytest.raises(RuntimeError, match=r"2 steps old, but train\.max_off_policy_steps allows 1"):
        flight.check_age(2)
    RolloutBuffer(RolloutSchedule(2, SAMPLES, extra=1, max_age=None), prompt_at).check_age(99)


def test_a_step_for_which_nothing_was_sampled_says_so():
    with pytest.raises(RuntimeError, match="step 1 found no samples"):
        RolloutBuffer(RolloutSchedule(2, SAMPLES), prompt_at).take(1)


def test_what_begins_again_has_no_samples_left():
    run = Run(RolloutSchedule(2, SAMPLES, lead=2, max_age=2, by_parts=True), 3, dynamic=False)
    for step in (1, 2):
        run.step(step)
    flight = run.flights[0]
    uids = [group["uid"] for group in flight.state_dict()["groups"]]
    flight.restart_all()
    groups = flight.state_dict()["groups"]
    assert [group["uid"] for group in groups] == uids
    assert {(group["born"], group["place"], group["replica"]) for group in groups} == {(None, None, None)}
    assert flight.samples() == ([], []) and flight.tables() == ((), {}) and flight.first_untrained(99) == min(uids)


def test_a_state_that_no_run_left_is_refused_in_words_or_taken_up():
    run = Run(RolloutSchedule(2, SAMPLES, extra=2, max_age=2, by_parts=True), 3, dynamic=True)
    for step in (1, 2, 3):
        run.step(step)
    flight, draw, refused = run.flights[0], random.Random(2), 0
    for _ in range(400):
        state = json.loads(json.dumps(flight.state_dict()))
        change_value(draw, state)
        other = RolloutBuffer(flight.schedule, prompt_at)
        try:
            with malformed_state_is_user_error(Path("step-00000003")):
                other.load_state(state, *flight.tables())
                other.replace_samples(*flight.samples(), {0: 0, 1: 1})
        except UserError:
            refused += 1
    assert 100 < refused < 400
