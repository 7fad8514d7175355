"""What each turn answers for: against sums written down, and the episode's where turns make no difference."""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms import base as algorithms
from mrl.config.config import AlgorithmConfig, RewardConfig, RewardFunctionConfig, RolloutConfig
from mrl.rollout import turn_credit
from mrl.rollout.dispatch import StepBatch
from mrl.rollout.sample_table import to_outcomes
from mrl.types import RolloutBatch, SampleTable

REWARD = RewardConfig(functions=[RewardFunctionConfig("exact_match"), RewardFunctionConfig("environment", weight=0.5)])
WEIGHTS = {"exact_match": 1.0, "environment": 0.5}
FP32 = 1e-6


def episodes(turn_rewards, others, *, group_size=2):
    """A table, and a batch of all of it: each turn two sampled tokens, then an observed one; the last has none."""
    columns = (*SampleTable.FACTS, "reward/exact_match", "reward/environment")
    rows = []
    for row, (given, other) in enumerate(zip(turn_rewards, others, strict=True)):
        facts = dict.fromkeys(columns, 0.0)
        facts |= {
            "uid": row // group_size, "sample_index": row % group_size, "prompt_len": 1,
            "response_len": 3 * len(given) - 1, "num_turns": len(given), "reward": other + 0.5 * sum(given),
            "reward/exact_match": other, "reward/environment": sum(given),
        }  # fmt: skip
        rows.append([float(facts[name]) for name in columns])
    keys = {(row // group_size, row % group_size): given for row, given in enumerate(turn_rewards)}
    table = SampleTable(columns, torch.tensor(rows, dtype=torch.float64), keys)
    lens = table["response_len"].long()
    mask = torch.cat([torch.tensor([True, True, False] * len(given))[:-1] for given in turn_rewards])
    batch = RolloutBatch(
        tokens_P=torch.zeros(int(lens.sum()) + len(rows), dtype=torch.int64),
        prompt_lens_B=torch.ones(len(rows), dtype=torch.int64),
        response_lens_B=lens,
        response_mask_R=mask,
        rollout_logprobs_R=torch.zeros(mask.numel()),
        group_id_B=table["uid"].long(),
        rewards_B=table["reward"].float(),
        truncated_B=torch.zeros(len(rows), dtype=torch.bool),
        values_R=torch.zeros(mask.numel()),
    )
    return table, StepBatch(batch, [list(range(len(rows)))], torch.arange(len(rows)))


def advantages(name, table, data, *, credit="turn", **settings):
    """By sequence and token, as the loop computes them."""
    given = AlgorithmConfig(name=name, credit=credit, **settings)
    algorithm = algorithms.build(given, RolloutConfig(n=2, response_length=64))
    facts = to_outcomes(table, WEIGHTS)
    facts = replace(facts, rewards_N=algorithm.shape_rewards(facts))
    index_U = data.index_B
    if credit == "turn":
        facts, index_U = turn_credit.assign_turn_credit(facts, table, data, REWARD)
    found = algorithm.outcome_advantages(facts)
    algorithm.advantages(data.batch, found[index_U], lambda tensor: tensor)
    return [part.tolist() for part in torch.split(data.batch.advantages_R, data.batch.response_lens_B.tolist())]


def test_a_turn_answers_for_its_reward_and_those_after_it():
    """Two samples of two turns: returns 0.5 * (2 + 4) + 1 and 0.5 * 4 + 1 of the one, 0.5 * 2 and 0 of the other."""
    table, data = episodes([[2.0, 4.0], [2.0, 0.0]], [1.0, 0.0])
    found = advantages("dr_grpo", table, data)
    first, second = (4.0 - 1.0) / 2, (3.0 - 0.0) / 2
    assert found == [[first, first, 0, second, second], [-first, -first, 0, -second, -second]]


def test_a_turn_is_compared_with_the_same_turn_of_those_that_came_so_far():
    table, data = episodes([[1.0], [0.0, 3.0], [0.0, 1.0]], [0.0, 0.0, 0.0], group_size=3)
    found = advantages("dr_grpo", table, data)
    mean = (0.5 + 1.5 + 0.5) / 3
    assert found[0] == pytest.approx([0.5 - mean] * 2, abs=FP32)
    assert found[1] == pytest.approx([1.5 - mean] * 2 + [0] + [0.5] * 2, abs=FP32)
    assert found[2] == pytest.approx([0.5 - mean] * 2 + [0] + [-0.5] * 2, abs=FP32)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo"])
def test_where_only_the_end_is_rewarded_turns_have_their_episodes_advantage(name):
    given, others = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 4.0], [0.0, 0.0, 2.0]], [0.0, 1.0, 0.0, 1.0]
    table, data = episodes(given, others)
    found = advantages(name, table, data)
    table, data = episodes(given, others)
    for turn, episode in zip(found, advantages(name, table, data, credit="episode"), strict=True):
        assert turn == pytest.approx(episode, abs=FP32)


def test_the_critic_learns_the_rewards_where_they_are_given():
    table, data = episodes([[2.0, 4.0], [2.0, 0.0]], [1.0, 0.0])
    advantages("ppo", table, data, gamma=0.5, lam=1.0)
    returns = torch.split(data.batch.returns_R, data.batch.response_lens_B.tolist())
    assert returns[0].tolist() == pytest.approx([0.5 * 1.75, 1.75, 0, 1.5, 3.0], abs=FP32)  # 1 + 0.5 * 0.5 * 3
    assert returns[1].tolist() == pytest.approx([0.5, 1.0, 0, 0, 0], abs=FP32)


def test_a_rank_may_hold_any_of_the_sequences():
    table, data = episodes([[2.0, 4.0], [2.0, 0.0]], [1.0, 0.0])
    expected = advantages("grpo", table, data)
    table, data = episodes([[2.0, 4.0], [2.0, 0.0]], [1.0, 0.0])
    part = StepBatch(data.batch.select([1]), [[0]], torch.tensor([1]))
    assert advantages("grpo", table, part) == expected[1:]
    empty = StepBatch(data.batch.select([]), [[]], torch.zeros(0, dtype=torch.int64))
    assert advantages("grpo", table, empty) == []


def test_rewards_of_other_turns_than_were_sampled_are_refused():
    table, data = episodes([[2.0, 4.0], [2.0, 0.0]], [1.0, 0.0])
    table.turn_rewards[0, 0] = [1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match=r"rewarded \[3, 2\] turns .* \[2, 2\] sampled parts"):
        advantages("grpo", table, data)
