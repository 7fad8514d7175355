"""Prompts are spread by the lengths seen so far, which every rank learns alike."""

from mrl.rollout.prompt_assignment import LengthHistory, assign
from mrl.rollout.sample_table import gather_table
from tests.ranks import run_ranks
from tests.rollout.samples import SAMPLES, groups_of, prompts, rollouts_of


def test_long_answers_start_first_and_spread_over_replicas():
    history = LengthHistory(1.0)
    history.load_state_dict({"default": 1.0, "lengths": {"data:5": 100.0, "data:2": 90.0}})
    first, second = assign(prompts(8), 2, SAMPLES, history)
    assert {first[0].uid, second[0].uid} == {5, 2}


def _history_after_table():
    groups, asked = groups_of({}), prompts(4)
    rollouts = [r for prompt in asked[groups.rank :: 4] for r in rollouts_of(prompt)]
    history = LengthHistory(9.0)
    history.update({prompt.uid: prompt.source for prompt in asked}, gather_table(rollouts, groups, []))
    return history.state_dict()


def test_every_rank_learns_the_same_lengths():
    states = run_ranks(4, _history_after_table)
    means = {f"data:{p.uid}": sum(len(r.response_ids) for r in rollouts_of(p)) / SAMPLES for p in prompts(4)}
    assert all(state == states[0] for state in states)
    assert states[0]["lengths"] == means
