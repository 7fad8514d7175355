"""Metrics by data set: the held-out ones against what verl's own code made of the same samples (`verl_golden.py`)."""

import json

import pytest
import torch

from mrl.observability import data_sources
from mrl.types import SampleTable
from tests.observability.verl_golden import GOLDEN

CASES = json.loads(GOLDEN.read_text())
ROUNDING = 1e-12  # fp64 sums over a thousand draws in another order


def sample_table(samples, columns=(), parts=()):
    """Rows of `samples`, each with uid and reward, in their order."""
    names = (*SampleTable.FACTS, *columns)
    rows, counts = [], {}
    for index, sample in enumerate(samples):
        counts[sample["uid"]] = counts.get(sample["uid"], -1) + 1
        known = {"uid": sample["uid"], "sample_index": counts[sample["uid"]], "reward": sample["reward"]}
        known |= {"correct": float(sample["reward"] > 0.5), "response_len": sample.get("response_len", 2)}
        rows.append([known.get(name, 0.0) for name in SampleTable.FACTS] + [part[index] for part in parts])
    return SampleTable(names, torch.tensor(rows, dtype=torch.float64))


def held_out(samples, **options):
    table = sample_table(samples, **options)
    keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
    facts = {key: sample["facts"] for key, sample in zip(keys, samples, strict=True) if sample["facts"]}
    return data_sources.held_out_metrics(table, {s["uid"]: s["source"] for s in samples}, facts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['samples'])} samples")
def test_names_and_numbers_are_verls(case):
    found = held_out(case["samples"])
    assert set(found) == set(case["metrics"])
    assert found == pytest.approx(case["metrics"], abs=ROUNDING)


def test_a_prompt_with_a_sample_of_which_a_fact_is_unknown_is_left_out_of_it():
    samples = [
        {"uid": 0, "source": "a", "reward": 1.0, "facts": {"acc": 1.0, "pred": "7"}},
        {"uid": 0, "source": "a", "reward": 0.0, "facts": {}},  # its function failed
        {"uid": 1, "source": "a", "reward": 0.0, "facts": {"acc": 0.0, "pred": "7"}},
        {"uid": 1, "source": "a", "reward": 1.0, "facts": {"acc": 0.0, "pred": "7"}},
    ]
    found = held_out(samples)
    assert found["val-core/a/acc/mean@2"] == 0.0
    assert found["val-aux/a/reward/mean@2"] == 0.5
    assert found["val-core/a/acc/maj@2/mean"] == 0.0


def test_several_reward_functions_are_variables_of_their_own():
    samples = [{"uid": 0, "source": "a", "reward": 1.5, "facts": {}}]
    columns = ("reward/exact_match", "reward/length")
    found = held_out(samples, columns=columns, parts=([1.0], [0.5]))
    assert found == {
        "val-core/a/reward/mean@1": 1.5,
        "val-aux/a/exact_match/mean@1": 1.0,
        "val-aux/a/length/mean@1": 0.5,
    }
    assert held_out(samples, columns=columns[:1], parts=([1.0],)) == {"val-core/a/reward/mean@1": 1.5}


def test_training_metrics_by_hand():
    samples = [{"uid": uid, "reward": reward, "response_len": 3 * uid} for uid, reward in enumerate([1.0, 0.0, 0.25])]
    found = data_sources.training_metrics(sample_table(samples), {0: "x/y", 1: "x/y", 2: "z"})
    assert found == {
        "train/x/y/reward/mean": 0.5,
        "train/x/y/accuracy": 0.5,
        "train/x/y/response_length/mean": 1.5,
        "train/x/y/frac": pytest.approx(2 / 3, abs=ROUNDING),
        "train/z/reward/mean": 0.25,
        "train/z/accuracy": 0.0,
        "train/z/response_length/mean": 6.0,
        "train/z/frac": pytest.approx(1 / 3, abs=ROUNDING),
    }


def test_headlines_are_the_core_means_of_several_data_sets():
    metrics = ["val-core/x/y/acc/mean@4", "val-core/z/reward/mean@1", "val-core/z/reward/best@2/mean"]
    assert data_sources.headlines(metrics) == {"x/y": "val-core/x/y/acc/mean@4", "z": "val-core/z/reward/mean@1"}
    assert data_sources.headlines(["val-core/z/reward/mean@1", "val-aux/y/reward/mean@1"]) == {}
