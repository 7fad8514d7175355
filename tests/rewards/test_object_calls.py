"""Reward functions that a script passed are called in this process, and fail as those in workers do."""

import asyncio
import math

import pytest

from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.config.user_code import named_objects, object_name
from mrl.errors import UserError
from mrl.rewards.scorer import Scorer
from tests.rewards.rollouts import TOKENIZER, rollout


def score(rollouts, *functions, stop=lambda: False, **options):
    """Scores with objects, given as functions or as (function, batch); returns the rewards."""
    objects, named = {}, []
    for one in functions:
        function, batch = one if isinstance(one, tuple) else (one, None)
        name = object_name(function, objects)
        objects[name] = function
        named.append(RewardFunctionConfig(name, 1.0, {}, batch))
    config = RewardConfig(functions=[*named, RewardFunctionConfig("exact_match")], **options)
    with named_objects(objects), Scorer(config, TOKENIZER.decode, TOKENIZER.eos_ids) as scorer:
        scorer.score(rollouts, stop)
    return [one.reward for one in rollouts]


def group(*texts, uid=0):
    return [rollout(text, uid=uid, sample_index=index) for index, text in enumerate(texts)]


def test_each_calling_convention_sees_its_samples_and_the_rewards_add_up():
    sizes = []

    def mine(*, prompt, response, answer, extra):
        return {"score": len(response), "half": len(response) / 2}

    def verls(solution_str, ground_truth):
        return 10.0 * (solution_str == ground_truth)

    def trls(completions, **columns):
        sizes.append(len(completions))
        return [100.0 for _ in completions]

    rollouts = [*group("3", "33"), *group("4", uid=1)]
    assert score(rollouts, mine, verls, trls) == [112.0, 102.0, 101.0]
    assert sizes == [2, 1]
    assert rollouts[1].reward_facts["half"] == 1.0 and not rollouts[0].reward_cached
    sizes.clear()
    score(rollouts, (trls, "replica"))
    assert sizes == [3]


def test_coroutines_wait_together():
    inside = []

    async def meets(*, prompt, response, answer, extra):
        inside.append(response)
        while len(inside) < 3:
            await asyncio.sleep(0)
        return 1.0

    assert score(group("1", "2", "4"), meets) == [1.0, 1.0, 1.0]


def test_an_exception_fails_its_sample_and_too_many_stop_the_job():
    called = []

    def picky(*, prompt, response, answer, extra):
        called.append(response)
        return {"a": 1.0}[response]

    rewards = score(group("a", "b", "a", "a"), picky)
    assert rewards[:1] + rewards[2:] == [1.0, 1.0, 1.0] and math.isnan(rewards[1])
    called.clear()
    with pytest.raises(UserError, match="KeyError"):
        score(group(*"bbbbbb"), picky, max_failed_frac=0.0)
    assert len(called) == 1


def test_a_stop_request_leaves_the_rest_without_a_reward():
    called = []

    def counts(*, prompt, response, answer, extra):
        called.append(response)
        return 1.0

    rollouts = group("1", "2", "4")
    score(rollouts, counts, stop=lambda: len(called) >= 2)
    assert len(called) == 2


def test_a_function_that_cannot_be_called_is_refused_before_the_run():
    with pytest.raises(UserError, match="cannot be called"):
        score([], lambda text: 1.0)
