"""Advantages: goldens by hand with their equations, properties and invariances."""

import json
import math
from pathlib import Path

import pytest
import torch

from mrl.algorithms.base import Outcomes, build
from mrl.algorithms.functional.advantages import (
    best_of_group,
    decoupled,
    group_relative,
    informative_groups,
    length_weighted,
    mean_relative,
    overlong_penalty,
    reward_to_go,
    whiten,
)
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.config.verl_keys.loss_names import VERL_ESTIMATORS

FP64 = 1e-12  # fp64 sums of a few dozen numbers of order 1
VERL_FP32 = 5e-6  # verl computes in fp32, and its epsilons of 1e-6 and 1e-8 stand elsewhere
VERL_GDPO = [1.4915975, -0.0253488, -1.4662488, 0.4329374, 0.4329374, -0.8658748]
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 5.0], dtype=torch.float64)


def _close(got: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=FP64, atol=FP64)


@pytest.mark.parametrize(("std", "dof"), [("unbiased", 2), ("population", 3)])
def test_group_relative_by_hand(std: str, dof: int) -> None:
    # (R - mean) / (sigma + eps); group 7: mean 0.5, squares 0.25 + 0.25 + 0; group 3: mean 3, squares 1 + 1 + 4
    first, second = math.sqrt(0.5 / dof) + 0.1, math.sqrt(6 / dof) + 0.1
    got_N = group_relative(REWARDS, GROUPS, std=std, eps=0.1, singleton="error")  # type: ignore[arg-type]
    _close(got_N, [0.5 / first, -0.5 / first, 0.0, -1 / second, -1 / second, 2 / second])


def test_deviation_of_the_batch_by_hand() -> None:
    # all rewards: mean 1.75, squares .5625 + 3.0625 + 1.5625 + .0625 + .0625 + 10.5625 = 15.875
    for std, dof in (("unbiased", 5), ("population", 6)):
        sigma = math.sqrt(15.875 / dof) + 0.1
        got_N = group_relative(REWARDS, GROUPS, std=std, eps=0.1, over="batch", singleton="error")  # type: ignore[arg-type]
        _close(got_N, [value / sigma for value in (0.5, -0.5, 0.0, -1.0, -1.0, 2.0)])
    assert not group_relative(torch.ones(4), GROUPS[:4] * 0, std="unbiased", over="batch", singleton="error").any()


def test_mean_relative_by_hand() -> None:
    # group 7: mean 0.5; group 3: mean 3; group 9: mean 0
    rewards_N, groups_N = torch.cat([REWARDS, torch.zeros(2)]), torch.cat([GROUPS, torch.tensor([9, 9])])
    _close(mean_relative(rewards_N, groups_N, singleton="error"), [1, -1, 0, -1 / 3, -1 / 3, 2 / 3, 0, 0])
    below = mean_relative(torch.tensor([-1.0, -3.0, 5.0]), torch.tensor([1, 1, 2]), singleton="reward")
    assert below.tolist() == [0, 0, 5]


def test_decoupled_is_that_of_verl_where_all_responses_are_as_long() -> None:
    # verl 0.9.1's compute_gdpo_outcome_advantage, weights 1 and 0.5, responses of two tokens: its sigma is over 12 - 1
    parts_NF = torch.tensor([[1, 0, 0, 1, 1, 0], [0.3, 0.9, 0.1, 0.2, 0.2, 0.8]], dtype=torch.float64).T
    groups_N = torch.tensor([0, 0, 0, 1, 1, 1])
    got_N = decoupled(parts_NF, torch.tensor([1.0, 0.5]), groups_N, std="unbiased", eps=1e-6, singleton="error")
    tokens = math.sqrt((6 / 5) * (11 / 12))
    torch.testing.assert_close(got_N * tokens, torch.tensor(VERL_GDPO, dtype=torch.float64), rtol=0, atol=VERL_FP32)


def test_decoupled_leaves_out_what_a_function_did_not_give() -> None:
    nan = math.nan
    parts_NF = torch.tensor([[1.0, nan], [0.0, 2.0], [0.0, 4.0], [1.0, nan]], dtype=torch.float64)
    groups_N = torch.tensor([0, 0, 0, 0])
    got_N = decoupled(parts_NF, torch.tensor([1.0, 1.0]), groups_N, std="none", singleton="error")
    _close(got_N, [0.5, -1.5, 0.5, 0.5])
    alone_N = decoupled(parts_NF, torch.tensor([0.0, 1.0]), torch.tensor([0, 0, 1, 1]), std="none", singleton="error")
    assert alone_N.tolist() == [0] * 4


VERL = json.loads(Path(__file__).with_name("verl_advantages.json").read_text())


@pytest.mark.parametrize("case", VERL, ids=[f"{one['case']}-{one['estimator']}-{one['by_std']}" for one in VERL])
def test_advantages_of_an_algorithm_are_those_of_verls_estimator(case: dict) -> None:
    std = {} if case["estimator"] in ("opo", "rloo") else {"advantage_std": "unbiased" if case["by_std"] else "none"}
    algorithm = build(AlgorithmConfig(name=VERL_ESTIMATORS[case["estimator"]], **std), RolloutConfig(n=4))
    rewards_N, lens_N = torch.tensor(case["rewards"], dtype=torch.float64), torch.tensor(case["lens"])
    # an environment's tokens count in no baseline
    with_others_N = lens_N + torch.arange(lens_N.numel())
    given = (rewards_N, torch.tensor(case["groups"]), with_others_N, lens_N < 0)
    got_N = algorithm.outcome_advantages(Outcomes(*given, sampled_lens_N=lens_N))
    # verl divides the rounding of a mean of equal rewards by its epsilon of 1e-6
    torch.testing.assert_close(got_N, torch.tensor(case["advantages"], dtype=torch.float64), rtol=0, atol=1e-10)


def test_the_length_weighted_baseline_balances_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards_N, groups_N = torch.randn(30, generator=generator, dtype=torch.float64), torch.arange(30) % 4
    lens_N = torch.randint(1, 9, (30,), generator=generator)
    advantages_N = length_weighted(rewards_N, lens_N, groups_N, singleton="error")
    for group in groups_N.unique():
        assert (lens_N * advantages_N)[groups_N == group].sum().abs() < FP64 * 100
    equal_N = length_weighted(rewards_N, lens_N * 0 + 5, groups_N, singleton="error")
    torch.testing.assert_close(equal_N, group_relative(rewards_N, groups_N, std="none", singleton="error"))
    same_N = length_weighted(torch.full((3,), 0.1), torch.tensor([1, 5, 9]), torch.zeros(3).long(), singleton="error")
    assert same_N.tolist() == [0.0] * 3


@pytest.mark.parametrize("singleton", ["zero", "reward"])
def test_the_only_sample_of_a_group_follows_the_policy(singleton: str) -> None:
    rewards_N, groups_N = torch.tensor([2.0, 3.0, 1.0]).double(), torch.tensor([7, 8, 8])
    alone = 2.0 if singleton == "reward" else 0.0
    lens_N = torch.tensor([4, 1, 3])
    assert length_weighted(rewards_N, lens_N, groups_N, singleton=singleton).tolist() == [alone, 1.5, -0.5]  # type: ignore[arg-type]
    assert best_of_group(rewards_N, groups_N, std="none", singleton=singleton).tolist() == [alone, 2.0, 0.0]  # type: ignore[arg-type]
    for function in (lambda: length_weighted(rewards_N, lens_N, groups_N, singleton="error"),
                     lambda: best_of_group(rewards_N, groups_N, std="none", singleton="error")):  # fmt: skip
        with pytest.raises(ValueError, match="group 7"):
            function()


def test_without_deviation_it_is_the_centred_reward() -> None:
    _close(group_relative(REWARDS, GROUPS, std="none", singleton="error"), [0.5, -0.5, 0.0, -1.0, -1.0, 2.0])


def test_leave_one_out_by_hand() -> None:
    # R_i - mean of the others: 1 - 0.25, 0 - 0.75, 0.5 - 0.5; 2 - 3.5, 2 - 3.5, 5 - 2
    got_N = group_relative(REWARDS, GROUPS, baseline="leave_one_out", std="none", singleton="error")
    _close(got_N, [0.75, -0.75, 0.0, -1.5, -1.5, 3.0])


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_advantages_sum_to_zero_per_group_and_follow_their_row(std: str, baseline: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_N = torch.randn(40, generator=generator, dtype=torch.float64)
    groups_N = (torch.arange(40) % 6 * 1000)[torch.randperm(40, generator=generator)]
    kwargs = {"baseline": baseline, "std": std, "eps": 1e-6, "singleton": "error"}
    advantages_N = group_relative(rewards_N, groups_N, **kwargs)  # type: ignore[arg-type]
    for group in groups_N.unique():
        assert advantages_N[groups_N == group].sum().abs() < FP64 * 100
    order = torch.randperm(40, generator=generator)
    shuffled_N = group_relative(rewards_N[order], groups_N[order], **kwargs)  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled_N, advantages_N[order], rtol=FP64, atol=FP64)


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_a_group_of_equal_rewards_gets_exactly_zero(std: str) -> None:
    # 0.1 + 0.1 + 0.1 is not 3 x 0.1: the mean's rounding over a tiny eps must not become an advantage
    rewards_N = torch.full((3,), 0.1, dtype=torch.float64)
    got_N = group_relative(rewards_N, torch.zeros(3, dtype=torch.int64), std=std, eps=1e-20, singleton="error")  # type: ignore[arg-type]
    assert got_N.tolist() == [0.0, 0.0, 0.0]


def test_singleton_groups_follow_the_policy() -> None:
    rewards_N, groups_N = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([5, 9, 9])
    with pytest.raises(ValueError, match="group 5 has one sample"):
        group_relative(rewards_N, groups_N, std="none", singleton="error")
    for baseline in ("mean", "leave_one_out"):
        scale = 1.0 if baseline == "leave_one_out" else 0.5
        kwargs = {"baseline": baseline, "std": "none"}
        assert group_relative(rewards_N, groups_N, singleton="zero", **kwargs).tolist() == [0.0, scale, -scale]  # type: ignore[arg-type]
        assert group_relative(rewards_N, groups_N, singleton="reward", **kwargs).tolist() == [2.0, scale, -scale]  # type: ignore[arg-type]


def test_informative_groups_are_those_whose_rewards_differ() -> None:
    groups_N = torch.tensor([4, 4, 2, 2, 8, 8])
    rewards_N = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.1, 0.1])
    assert informative_groups(rewards_N, groups_N).tolist() == [False, False, True, True, False, False]


def test_overlong_penalty_by_hand() -> None:
    # max 10, buffer 4: none up to 6, then linear, full at 10
    lens_N = torch.tensor([1, 6, 7, 9, 10, 12])
    got_N = overlong_penalty(lens_N, max_length=10, buffer_length=4, penalty=2.0)
    _close(got_N, [0.0, 0.0, -0.5, -1.5, -2.0, -2.0])
    assert overlong_penalty(lens_N, max_length=10, buffer_length=0, penalty=2.0).tolist() == [0.0] * 6


def test_reward_to_go_stays_inside_its_sequence() -> None:
    got_R = reward_to_go(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]))
    assert got_R.tolist() == [7.0, 6.0, 4.0, 8.0]
    assert reward_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_whiten_by_hand_and_over_split_ranks(std: str) -> None:
    values_R = torch.tensor([1.0, 3.0, 100.0, 5.0, 7.0])
    mask_R = torch.tensor([True, True, False, True, True])
    # mean 4, squares 9 + 1 + 1 + 9 = 20
    sigma = {"unbiased": math.sqrt(20 / 3) + 0.5, "population": math.sqrt(5) + 0.5, "none": 1.0}[std]
    want = [-3 / sigma, -1 / sigma, 0.0, 1 / sigma, 3 / sigma]
    _close(whiten(values_R, mask_R, lambda tensor: tensor, std=std, eps=0.5), want)  # type: ignore[arg-type]
    parts = [slice(0, 2), slice(2, 5), slice(5, 5)]
    sums = iter([torch.tensor([16.0, 4.0], dtype=torch.float64), torch.tensor([20.0], dtype=torch.float64)] * 3)
    split = [whiten(values_R[part], mask_R[part], lambda _: next(sums), std=std, eps=0.5) for part in parts]  # type: ignore[arg-type]
    _close(torch.cat(split), want)


def test_whiten_of_equal_values_or_of_nothing_is_zero() -> None:
    for num in range(1, 40):  # for some of these the mean of equal numbers is not quite that number
        values_R = torch.full((num,), 0.1, dtype=torch.float64)
        for mask in (True, False):
            got_R = whiten(values_R, torch.full((num,), mask), lambda tensor: tensor, std="unbiased", eps=1e-20)
            assert got_R.tolist() == [0.0] * num
