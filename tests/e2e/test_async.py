"""Sampling beside the updates: the same run whatever anything takes, and with 0 steps ahead the run of sync."""

import json

import pytest

from tests.e2e import runs
from tests.e2e.test_roles import logged, without_refits

OWN = "rollout.num_ranks"
STEPS = ["train.num_steps=4", "train.eval_interval=2", "checkpoint.interval=2"]


def off_policy(steps):
    return ["train.mode=async", f"train.max_off_policy_steps={steps}"]


LAYOUTS = {"one rank": (1, []), "dp 2": (2, []), "two that train, one that samples": (3, [f"{OWN}=1"])}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_step_ahead_is_the_run_of_sync_byte_for_byte(name, tmp_path):
    ranks, settings = LAYOUTS[name]
    runs.train_in_pool(tmp_path / "sync", [*STEPS, *settings], ranks)
    runs.train_in_pool(tmp_path / "async", [*STEPS, *settings, *off_policy(0)], ranks)
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert logged(tmp_path / "async", file) == logged(tmp_path / "sync", file)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ranks_of_their_own_give_the_run_of_ranks_that_do_both(steps, tmp_path):
    settings = [*STEPS, "train.num_steps=6", *off_policy(steps)]
    runs.train_in_pool(tmp_path / "both", settings, 1)
    runs.train_in_pool(tmp_path / "own", [*settings, f"{OWN}=1"], 2)
    (lines, _), (own_lines, _) = without_refits(tmp_path / "both"), without_refits(tmp_path / "own")
    assert lines == own_lines
    worst = [row.get("training/off_policy/trajectory_staleness_worst/max") for row in map(json.loads, lines)]
    assert max(age for age in worst if age is not None) <= steps


OVER = ["rollout.over_sample_rate=0.5"]


@pytest.mark.parametrize(
    "settings",
    [OVER, [*OVER, "train.max_off_policy_steps=1"], [*OVER, "rollout.over_age=drop", "train.max_off_policy_steps=0"]],
)
def test_more_prompts_than_a_batch(settings, tmp_path):
    settings = [*STEPS, "train.num_steps=6", "rollout.response_length=12", "rollout.max_num_seqs=6", *settings]
    runs.train_in_pool(tmp_path / "both", settings, 1)
    runs.train_in_pool(tmp_path / "own", [*settings, f"{OWN}=1"], 2)
    (lines, _), (own_lines, _) = without_refits(tmp_path / "both"), without_refits(tmp_path / "own")
    assert lines == own_lines
    names = [
        "training/off_policy/trajectory_staleness_worst/max",
        "training/off_policy/trajectory_spans/max",
        "rollout/num_carried_groups",
        "rollout/num_restarted_groups",
    ]
    for row in map(json.loads, lines):
        print([row.get(n) for n in names])
