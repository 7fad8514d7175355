"""Metrics against values worked out by hand."""

import math

import pytest
import torch

from mrl.observe import metrics
from mrl.types import Prompt, Rollout, SampleTable

COLUMNS = (*SampleTable.FACTS, "reward/exact_match")
EXACT = 1e-12  # fp64 arithmetic on a handful of numbers


def table():
    rows = [  # rank, uid, sample, prompt_len, response_len, reward, correct, failed, truncated, part
        [0, 7, 1, 3, 4, 0.0, 0, 0, 1, 0.0],
        [0, 7, 0, 3, 2, 1.0, 1, 0, 0, 1.0],
        [1, 5, 0, 5, 6, 0.5, 0, 1, 0, math.nan],
        [1, 5, 1, 5, 8, 0.5, 0, 0, 0, 0.5],
    ]
    return SampleTable(COLUMNS, torch.tensor(rows, dtype=torch.float64))


def test_outcome_metrics_by_hand():
    found = metrics.outcome_metrics(
        table(), rewards_N=torch.tensor([0.0, 0.0, 1.0, 2.0]), advantages_N=torch.tensor([-1.0, 0.0, 0.0, 1.0])
    )
    expected = {
        "critic/score/mean": 0.5, "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/mean": 0.75,
        "critic/advantages/min": -1.0, "prompt_length/mean": 4.0, "response_length/mean": 5.0,
        "response_length/clip_ratio": 0.25, "reward/exact_match/mean": 0.5, "reward/failed_frac": 0.25,
        "group/zero_variance_frac": 0.5, "group/reward_std/mean": 0.25, "group/best/mean": 0.75,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=EXACT), name


def test_evaluation_metrics_by_hand():
    found = metrics.evaluation_metrics(table())
    expected = {
        "val/accuracy": 0.25, "val/reward/mean": 0.5, "val/num_prompts": 2.0, "val/accuracy/best@2": 0.5,
        "val/accuracy/mean@2": 0.25, "val/reward/best@2": 0.75, "val/response_length/clip_ratio": 0.25,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=EXACT), name


def test_combine_takes_means_and_extremes():
    assert metrics.combine([{"a": 1.0, "b_max": 1.0, "c/min": 5.0}, {"a": 3.0, "b_max": 4.0, "c/min": 2.0}]) == {
        "a": 2.0,
        "b_max": 4.0,
        "c/min": 2.0,
    }


def rollout(**changes):
    return Rollout(Prompt(0, (1,), "p"), 0, [1], [0.0], "stop", 0, **changes)


def test_correct_is_what_the_first_function_says_of_a_sample_that_was_scored():
    assert metrics.is_correct(rollout(reward=-3.0, reward_parts={"exact": 1.0, "length": -4.0}))
    assert not metrics.is_correct(rollout(reward=2.0, reward_parts={"exact": 0.5, "length": 1.5}))
    assert not metrics.is_correct(rollout(reward_parts={"exact": 1.0}, reward_error="hangs"))


def test_wall_clock_names_are_told_from_deterministic_ones():
    assert all(map(metrics.is_wall_clock, ("timing_s/gen", "perf/throughput", "refit/copy_s")))
    assert not any(map(metrics.is_wall_clock, ("actor/pg_loss", "response_length/mean", "refit/bytes_moved")))
