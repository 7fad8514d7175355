"""Every rank learns what is said of each sample."""

import math

import pytest

from mrl.errors import UserError
from mrl.rollout.sample_table import gather_failures, gather_reward_facts, gather_table
from tests.ranks import run_ranks
from tests.rollout.samples import SAMPLES, groups_of, sampled


def facts_of_every_sample(grid_args, silent):
    """Whether every rank learns what was said of each sample; the replicas in `silent` say nothing."""
    groups = groups_of(grid_args)
    rollouts = sampled(groups, 5)
    for rollout in rollouts:
        if groups.grid.replica(groups.rank) not in silent:
            rollout.reward_facts = {"pred": f"{rollout.prompt.uid}\nß", "acc": rollout.sample_index / 3}
    return gather_reward_facts(rollouts, groups), [r.prompt.uid for r in rollouts if r.reward_facts]


@pytest.mark.parametrize("silent", [(), (0,), (0, 1)])
def test_every_rank_learns_what_reward_functions_say(silent):
    found = run_ranks(4, facts_of_every_sample, {"rollout_tp": 2}, silent)
    said = {uid for _, uids in found for uid in uids}
    expected = {(uid, i): {"pred": f"{uid}\nß", "acc": i / 3} for uid in said for i in range(SAMPLES)}
    assert [facts for facts, _ in found] == [expected] * 4
    assert len(said) == {0: 5, 2: 0}.get(len(silent), len(said))


def missing_scores(grid_args, silent):
    """What every rank is told of a table in which the samples of the first prompts in `silent` have no score."""
    groups = groups_of(grid_args)
    rollouts = sampled(groups, 5)
    for rollout in rollouts:
        if rollout.prompt.uid < silent:
            rollout.reward, rollout.reward_error = math.nan, f"down: {rollout.prompt.uid}"
    table = gather_table(rollouts, groups, ["r"])
    try:
        return gather_failures(rollouts, table, groups), table.scored["uid"].tolist(), table.scored.num_prompts
    except UserError as error:
        return str(error)


def test_samples_without_a_score_are_left_out_and_named_on_every_rank():
    assert (
        run_ranks(4, missing_scores, {"rollout_tp": 2}, 0)
        == [("", [float(uid) for uid in range(5) for _ in range(SAMPLES)], 5)] * 4
    )
    found = run_ranks(4, missing_scores, {"rollout_tp": 2}, 1)
    told = "scoring failed for 3 of 15 samples; 3 have no score and are left out: down: 0 | down: 0 | down: 0"
    assert found == [(told, [float(uid) for uid in range(1, 5) for _ in range(SAMPLES)], 4)] * 4
    (refused,) = set(run_ranks(4, missing_scores, {"rollout_tp": 2}, 5))
    assert refused.startswith("none of the 15 samples has a score: down: ")
