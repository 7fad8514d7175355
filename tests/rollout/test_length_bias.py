"""Acceptance by length: the figures of schedules whose lengths are known, and the same after they were stored."""

import json
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.parallel_layout import ParallelLayout
from mrl.rollout import length_bias
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.rollout.buffer import RolloutBuffer
from mrl.rollout.length_bias import Acceptance, by_quarter
from mrl.types import PartialRollout, Prompt, Rollout, SampleTable

ALONE = ParallelLayout(1)


def prompt_at(uid):
    return Prompt(uid, (1,), "p", source=f"data:{uid}")


class Run:
    """Groups of two samples of known lengths, which all get a token at each tick; sampling stops when a batch is whole.

    Attributes:
        expected: What must be told of each step, counted sample by sample.
        told: What was.
    """

    def __init__(self, schedule, lengths):
        self.flight, self.lengths = RolloutBuffer(schedule, prompt_at), lengths
        self.drawn = self.version = self.thrown = self.thrown_tokens = 0
        self.had, self.began, self.taken = {}, {}, []
        self.expected, self.told = [], []

    def step(self, step, stored):
        if stored:
            self.store()
        flight = self.flight
        flight.record_policy_version(step, step - 1)
        before = dict(self.had)
        flight.restart_too_old(step)
        for group in flight.state_dict()["groups"]:
            if group["born"] is None and before.pop(group["uid"], 0):
                self.thrown += 2
                self.thrown_tokens += sum(self.tokens(group["uid"]))
                self.had[group["uid"]] = 0
        room = flight.num_drawable(step, concurrent=False)
        flight.draw(prompt_at(uid) for uid in range(self.drawn, self.drawn + room))
        self.drawn += room
        groups = [group.uid for group in flight.unfinished(step, concurrent=False)]
        self.sample(groups, step)
        self.check(step)

    def tokens(self, uid):
        return [min(self.had[uid], length) for length in self.lengths[uid]]

    def sample(self, groups, step):
        flight, whole = self.flight, []
        for uid in groups:
            self.had.setdefault(uid, 0)
        while not flight.may_stop(whole, step, ahead=False):
            for uid in groups:
                self.had[uid] += 1
                self.began.setdefault(uid, step)
            whole += [uid for uid in groups if uid not in whole and self.had[uid] >= max(self.lengths[uid])]
        rows = [self.rollout(uid, index, step) for uid in whole for index in (0, 1)]
        for uid in groups:
            flight.partial_rollouts.pop(uid, None)
            if uid not in whole and self.had[uid]:
                flight.partial_rollouts[uid] = [
                    PartialRollout(prompt_at(uid), index, (2,) * count, (-1.0,) * count, ((step, count),))
                    for index, count in enumerate(self.tokens(uid))
                ]
        flight.mark_partial(
            [(uid, 0, *flight.local_size(uid)) for uid in flight.partial_rollouts if uid in groups], step - 1
        )
        facts_NC = torch.tensor([row(one) for one in rows], dtype=torch.float64).view(-1, len(SampleTable.FACTS))
        table = SampleTable(SampleTable.FACTS, facts_NC)
        flight.complete(whole, rows, table, table, step - 1, ALONE)

    def rollout(self, uid, index, step):
        length = self.lengths[uid][index]
        return Rollout(prompt_at(uid), index, [2] * length, [-1.0] * length, "stop", step)

    def check(self, step):
        taken = self.flight.take(step)
        uids = sorted(set(taken.table["uid"].long().tolist()))
        self.taken += uids
        samples = [(length, self.began[uid] == step) for uid in uids for length in self.lengths[uid]]
        accepted = [length for uid in self.taken for length in self.lengths[uid]]
        carried = [count for uid in self.had if uid not in self.taken for count in self.tokens(uid) if count]
        begun = sum(accepted) + sum(carried) + self.thrown_tokens
        num_begun = len(accepted) + len(carried) + self.thrown
        self.expected.append(
            {"samples": samples, "rollout/num_accepted_samples": len(accepted), "rollout/num_begun_samples": num_begun}
            | {"rollout/accepted_mean_length": sum(accepted) / len(accepted)}
            | {"rollout/begun_mean_length": begun / num_begun}
            | ({"rollout/carried_mean_length": sum(carried) / len(carried)} if carried else {})
        )
        self.told.append(self.flight.acceptance.metrics(taken.carried))

    def store(self):
        other = RolloutBuffer(self.flight.schedule, prompt_at)
        other.load_state(json.loads(json.dumps(self.flight.state_dict())), *self.flight.tables())
        other.replace_samples(*self.flight.samples(), {0: 0})
        self.flight = other


def row(rollout):
    facts = {"uid": rollout.prompt.uid, "sample_index": rollout.sample_index, "num_versions": 1}
    facts |= {"response_len": len(rollout.response_ids), "version": rollout.policy_version}
    return [float(facts.get(name, 0)) for name in SampleTable.FACTS]


def quarters(samples):
    """By hand: sorted by length, sample k of N is in quarter k * 4 // N, and equal lengths share what they have."""
    found = [[Fraction(0), 0] for _ in range(4)]
    lengths = sorted(length for length, _ in samples)
    for place, length in enumerate(lengths):
        same = [at_once for other, at_once in samples if other == length]
        pair = found[place * 4 // len(lengths)]
        pair[0] += Fraction(sum(same), len(same))
        pair[1] += 1
    return found


LENGTHS = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=25, deadline=None)
@given(
    draw=LENGTHS,
    batch=st.integers(1, 5),
    extra=st.integers(1, 4),
    bound=st.sampled_from([(None, True), (1, True), (2, True), (0, False), (1, False)]),
    stored_at=st.integers(2, 9),
)
def test_the_figures_are_those_of_the_samples_also_where_a_run_was_resumed(draw, batch, extra, bound, stored_at):
    most, waits = bound
    schedule = RolloutSchedule(batch, 2, extra=extra, max_age=most, waits=waits, by_parts=True)
    lengths = [[draw.randint(1, 12), draw.randint(1, 30)] for _ in range(200)]
    run = Run(schedule, lengths)
    for step in range(1, 11):
        run.step(step, stored=step == stored_at)
        told, expected = run.told[-1], dict(run.expected[-1])
        expected.pop("samples")
        assert {name: told[name] for name in told if "quarter" not in name} == expected
        sums = [
            [sum(each) for each in zip(*parts, strict=True)]
            for parts in zip(*(quarters(one["samples"]) for one in run.expected), strict=True)
        ]
        for number, (at_once, count) in enumerate(sums, 1):
            name = f"rollout/accepted_at_once/quarter_{number}"
            assert (name in told) == bool(count)
            assert not count or told[name] == pytest.approx(float(at_once / count), abs=1e-12)
    assert 2 * len(run.taken) == told["rollout/num_accepted_samples"] == 20 * batch


def test_long_answers_are_taken_later_and_no_less_often():
    draw = random.Random(5)
    lengths = [[1 + int(draw.expovariate(0.05)) for _ in range(2)] for _ in range(1000)]
    run = Run(RolloutSchedule(8, 2, extra=4, max_age=None, by_parts=True), lengths)
    for step in range(1, 101):
        run.step(step, stored=False)
    told = run.told[-1]
    first, *_, last = (told[f"rollout/accepted_at_once/quarter_{number}"] for number in (1, 2, 3, 4))
    assert first > 0.7 > 0.5 > last  # within a step
    early, late = (one["rollout/begun_mean_length"] / one["rollout/accepted_mean_length"] for one in run.told[0::99])
    assert early > 1.1 and abs(late - 1) < 0.02  # over the run


def test_what_is_thrown_away_was_begun():
    counts = Acceptance()
    counts.record_consumed(2, 6, torch.tensor([2, 4]), torch.tensor([True, True]))
    counts.record_discarded(1, 12)
    told = counts.metrics((0, 0))
    assert (told["rollout/accepted_mean_length"], told["rollout/begun_mean_length"]) == (3.0, 6.0)
    assert "rollout/carried_mean_length" not in told


@given(draw=LENGTHS, count=st.integers(1, 30))
def test_the_order_of_equal_lengths_changes_nothing(draw, count):
    samples = [(draw.randint(1, 6), draw.random() < 0.5) for _ in range(count)]
    found = []
    for _ in range(2):
        lens, at_once = zip(*samples, strict=True)
        found.append(by_quarter(torch.tensor(lens), torch.tensor(at_once)))
        draw.shuffle(samples)
    assert found[0] == found[1]


def test_only_the_last_steps_count_and_a_state_of_no_run_is_refused(monkeypatch):
    monkeypatch.setattr(length_bias, "WINDOW", 2)
    counts = Acceptance()
    for at_once in (False, True, True):
        counts.record_consumed(4, 10, torch.tensor([1, 2, 3, 4]), torch.tensor([at_once] * 4))
    assert counts.rate_by_quarter() == [1.0] * 4 and counts.taken == [12, 30]
    assert Acceptance.of(json.loads(json.dumps(counts.state_dict()))) == counts
    for name, wrong in (("recent", [[[1.0, 1.0]]]), ("taken", [1]), ("discarded", None)):
        with pytest.raises((LookupError, TypeError, ValueError)):
            Acceptance.of(counts.state_dict() | {name: wrong})
