"""Each number has a range, and each field with one value refuses another."""

from typing import get_args

import pytest

from mrl.config.config import Config, RewardFunctionConfig
from mrl.config.keys import dotted_keys
from mrl.trainer.validation.ranges import RANGES
from mrl.trainer.validation.validate import check_config
from tests.trainer.validation.runs import changed, make, refusal


def test_every_number_outside_algorithm_has_a_range():
    def is_number(kind) -> bool:
        return kind in (int, float) or bool({int, float} & set(get_args(kind)))

    numbers = {key for key, kind in dotted_keys(Config).items() if is_number(kind) and not key.startswith("algorithm.")}
    assert numbers == set(RANGES)


def test_numbers_below_their_ranges_are_refused():
    bounded = [key for key, allowed in RANGES.items() if not allowed.startswith("[-1e9")]
    told = refusal(make(*(f"{key}=-2" for key in bounded)))
    assert [key for key in bounded if f"{key}=-2 is out of range; expected {RANGES[key]}" not in told] == []


def test_numbers_above_their_ranges_are_refused():
    highest = {key: allowed[1:-1].split(", ")[1] for key, allowed in RANGES.items() if "inf)" not in allowed}
    told = refusal(make(*(f"{key}={float(high) + 0.5}" for key, high in highest.items())))
    assert [key for key in highest if f"{key}={float(highest[key]) + 0.5} is out of range" not in told] == []


@pytest.mark.parametrize(
    ("key", "edge", "allowed"),
    [
        ("reward.num_workers", 1024, True),
        ("reward.num_workers", 100_000, False),
        ("train.batch_size", 10**30, False),
        ("run.collective_timeout_s", 1e9, False),
        ("parallel.context_parallel_size", 10**9, False),
        ("rollout.temperature", 0.0, False),
        ("rollout.top_p", 1.0, True),
        ("rollout.top_p", 0.0, False),
        ("rollout.min_p", 0.0, True),
        ("rollout.min_p", 1.0, False),
        ("rollout.gpu_memory_utilization", 1.0, False),
        ("rollout.top_k", -1, True),
        ("rollout.top_k", 0, False),
        ("rollout.top_k", 1, True),
        ("actor.adam_beta1", 1.0, False),
        ("actor.clip_grad", 0.0, True),
        ("checkpoint.keep_last", 0, False),
    ],
)
def test_edges_of_ranges(key, edge, allowed):
    config = make(f"{key}={edge}")
    if allowed:
        check_config(config, world_size=1)
    else:
        assert f"{key}={edge} is out of range" in refusal(config)


@pytest.mark.parametrize("key", ["actor.lr", "rollout.temperature", "reward.error_value"])
@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_not_a_number_and_infinity_are_refused(key, value):
    assert f"{key}={value[1:]} is out of range" in refusal(make(f"{key}={value}"))


def test_a_weight_that_is_not_finite_is_refused():
    config = make()
    broken = changed(config, "reward.functions", [RewardFunctionConfig(), RewardFunctionConfig(weight=float("nan"))])
    assert "reward.functions[1].weight=nan" in refusal(broken)


RULES = [
    # overrides, ranks, what the message says
    (["rollout.repetition_penalty=1.1"], 1, "rollout.repetition_penalty=1.1 is refused; it must be 1.0"),
    (["rollout.calculate_log_probs=false"], 1, "rollout.calculate_log_probs=False is refused"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)
