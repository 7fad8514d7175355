"""Every rank learns what is said of each sample."""

import pytest

from mrl.rollout.table import gather_facts
from tests.ranks import run_ranks
from tests.rollout.samples import SAMPLES, groups_of, sampled


def facts_of_every_sample(grid_args, silent):
    """Whether every rank learns what was said of each sample; the replicas in `silent` say nothing."""
    groups = groups_of(grid_args)
    rollouts = sampled(groups, 5)
    for rollout in rollouts:
        if groups.grid.replica(groups.rank) not in silent:
            rollout.reward_facts = {"pred": f"{rollout.prompt.uid}\nß", "acc": rollout.sample_index / 3}
    return gather_facts(rollouts, groups), [r.prompt.uid for r in rollouts if r.reward_facts]


@pytest.mark.parametrize("silent", [(), (0,), (0, 1)])
def test_every_rank_learns_what_reward_functions_say(silent):
    found = run_ranks(4, facts_of_every_sample, {"rollout_tp": 2}, silent)
    said = {uid for _, uids in found for uid in uids}
    expected = {(uid, i): {"pred": f"{uid}\nß", "acc": i / 3} for uid in said for i in range(SAMPLES)}
    assert [facts for facts, _ in found] == [expected] * 4
    assert len(said) == {0: 5, 2: 0}.get(len(silent), len(said))
