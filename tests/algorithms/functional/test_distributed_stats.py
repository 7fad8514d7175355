"""Mean, extremes and variance of all parts from sums of each."""

import pytest
import torch

from mrl.algorithms.functional.distributed_stats import spread_metrics, spread_sums


def test_the_parts_of_ranks_give_what_the_whole_does():
    torch.manual_seed(0)
    columns = torch.randn(2, 40, dtype=torch.float64) * 3 - 1
    mask_R = torch.rand(40) > 0.3
    parts = [
        spread_sums(columns[:, start:stop].unbind(), mask_R[start:stop]) for start, stop in ((0, 3), (3, 3), (3, 40))
    ]
    sums = torch.stack([sums for sums, _ in parts]).sum(0)
    largest = torch.stack([largest for _, largest in parts]).amax(0)
    for found, values_R in zip(spread_metrics(sums, largest), columns, strict=True):
        kept = values_R[mask_R]
        expected = (kept.mean(), kept.max(), kept.min(), kept.var())
        assert tuple(found) == pytest.approx([float(value) for value in expected])


def test_nothing_is_zero():
    sums, largest = spread_sums([torch.zeros(3)], torch.zeros(3, dtype=torch.bool))
    assert tuple(spread_metrics(sums, largest)[0]) == (0.0, 0.0, 0.0, 0.0)
