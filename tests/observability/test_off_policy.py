"""Ages of what a step trains on, from its table."""

import pytest
import torch

from mrl.observability.off_policy import staleness_metrics
from mrl.types import SampleTable

STEPS_OF = {10: 2, 13: 3, 16: 4}
"""Steps in the weights of each policy version; the step that trains is the sixth."""


def table(*rows):
    """Of (newest version, oldest version, how many, response length)."""
    names = ("version", "oldest_version", "num_versions", "response_len")
    facts = [dict(zip(names, row, strict=True)) | {"uid": place} for place, row in enumerate(rows)]
    filled = [[float(fact.get(name, 0)) for name in SampleTable.FACTS] for fact in facts]
    return SampleTable(SampleTable.FACTS, torch.tensor(filled, dtype=torch.float64))


def age_of(version):
    return 5 - STEPS_OF[version]


def test_ages_are_steps_between_weights_that_sampled_and_weights_that_train():
    found = staleness_metrics(
        table((16, 16, 1, 4), (16, 10, 3, 9), (13, 13, 1, 2), (16, 13, 2, 7)), age_of, num_carried=5
    )
    name = "training/off_policy/trajectory_"
    assert {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)} == {
        "staleness/mean": 1.25,  # 1 1 2 1
        "staleness/max": 2.0,
        "staleness/min": 1.0,
        "staleness_worst/mean": 2.0,  # 1 3 2 2
        "staleness_worst/max": 3.0,
        "staleness_worst/min": 1.0,
        "spans/mean": 1.75,
        "spans/max": 3.0,
        "spans/min": 1.0,
    }
    assert found["training/off_policy/short_response_staleness"] == 1.5  # lengths 2 and 4: ages 2 and 1
    assert found["training/off_policy/long_response_staleness"] == 2.5  # lengths 7 and 9: ages 2 and 3
    assert found["rollout/num_carried_groups"] == 5.0


def test_where_all_are_as_long_neither_half_is_older():
    found = staleness_metrics(
        table((16, 13, 2, 3), (16, 13, 2, 3), (16, 16, 1, 3), (16, 16, 1, 3)), age_of, num_carried=0
    )
    names = ("short", "long")
    assert {found[f"training/off_policy/{name}_response_staleness"] for name in names} == {1.5}


def test_one_sample_is_long_and_an_unknown_version_is_no_age():
    found = staleness_metrics(table((16, 13, 2, 4)), age_of, num_carried=0)
    assert found["training/off_policy/long_response_staleness"] == 2.0
    assert "training/off_policy/short_response_staleness" not in found
    with pytest.raises(KeyError):
        staleness_metrics(table((16, 1, 2, 4)), age_of, num_carried=0)
