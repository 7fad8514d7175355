"""How far sampling may run ahead, and beyond a batch, as the fields of a config say it together."""

from dataclasses import replace

import pytest

from mrl.config.config import Config, MultiTurnConfig, RolloutConfig, TrainConfig
from mrl.rollout.async_schedule import RolloutSchedule, max_off_policy_steps


def config(*, mode="sync", steps=None, batch_size=4, num_steps=9, **rollout):
    train = TrainConfig(mode=mode, max_off_policy_steps=steps, batch_size=batch_size, num_steps=num_steps)
    return replace(Config(), train=train, rollout=RolloutConfig(n=3, **rollout))


CASES = [
    # the config, its bound, then lead, extra and whether sampling stops early
    (config(), 0, (0, 0, False)),
    (config(mode="async"), 1, (1, 0, False)),
    (config(mode="async", steps=0), 0, (0, 0, False)),
    (config(mode="async", steps=1), 1, (1, 0, False)),
    (config(mode="async", steps=3), 3, (3, 0, True)),
    (config(mode="async", steps=3, multi_turn=MultiTurnConfig(enable=True)), 3, (3, 0, False)),
    (config(over_sample_rate=0.5), None, (0, 2, True)),
    (config(over_sample_rate=0.3, steps=2), 2, (0, 2, True)),
    (config(over_sample_rate=0.01, batch_size=10), None, (0, 1, True)),
    (config(over_sample_rate=0.07, batch_size=100), None, (0, 7, True)),  # the product of floats is above 7
    (config(over_sample_rate=2.2, batch_size=5), None, (0, 11, True)),
    (config(over_sample_rate=1.0, steps=0, over_age="drop"), 0, (0, 4, True)),
]


@pytest.mark.parametrize(("given", "bound", "expected"), CASES)
def test_a_schedule_is_what_the_fields_mean_together(given, bound, expected):
    plan = RolloutSchedule.of(given)
    assert max_off_policy_steps(given) == plan.max_age == bound
    assert (plan.lead, plan.extra, plan.by_parts) == expected
    assert (plan.batch_size, plan.num_samples, plan.num_steps) == (given.train.batch_size, 3, 9)
    assert plan.waits == (given.rollout.over_age == "wait")


def test_groups_are_taken_in_the_order_of_their_prompts_unless_more_begin_than_a_batch():
    for given, _, (lead, extra, _) in CASES:
        plan = RolloutSchedule.of(given)
        assert plan.in_order == (not extra)
        assert plan.is_off_policy == bool(lead or extra)
        assert plan.max_in_flight == given.train.batch_size * (1 + lead) + extra


@pytest.mark.parametrize(
    ("lead", "batch_size", "stock", "pace"), [(1, 4, 4, 2), (2, 4, 6, 2), (4, 5, 12, 2), (3, 1, 2, 1)]
)
def test_beside_an_update_half_of_what_is_far_ahead_may_stay_unfinished(lead, batch_size, stock, pace):
    plan = RolloutSchedule.of(config(mode="async", steps=lead, batch_size=batch_size))
    assert (plan.target_complete, plan.min_per_update) == (stock, pace)
    assert plan.batch_size <= plan.target_complete <= lead * plan.batch_size
