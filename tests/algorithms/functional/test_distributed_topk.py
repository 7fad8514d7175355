"""Order statistics over ranks: what sorting everything gives, ties and all."""

import pytest
import torch
from torch import Tensor

from mrl.algorithms.functional.distributed_topk import highest, kth_largest, top_k_mask
from tests.algorithms.ragged import on_values


def _draw(num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values with ties, both zeros and both signs; which count; a number of each one's own."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num, generator=generator, dtype=torch.float64).mul(3).round() / 3 * torch.tensor(-1.0)
    mask = torch.rand(num, generator=generator) > 0.2
    mask[0] = True
    return values, mask, torch.rand(num, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("cuts", [[60], [20, 20, 20], [1, 59, 0]])
def test_largest_are_those_of_a_sort_on_any_ranks(cuts: list[int]) -> None:
    values, mask, own = _draw(60, seed=1)
    order = sorted(torch.arange(60)[mask].tolist(), key=lambda row: (values[row].item(), own[row].item()), reverse=True)
    parts = list(zip(values.split(cuts), mask.split(cuts), own.split(cuts), strict=True))
    for k in (1, 2, 17, len(order) - 1, len(order), len(order) + 5):
        found = torch.cat(on_values(parts, lambda part, reduce, k=k: top_k_mask(part[0], part[1], k, part[2], reduce)))
        assert sorted(torch.arange(60)[found].tolist()) == sorted(order[:k])
        if k <= len(order):
            (value, *_) = on_values(parts, lambda part, reduce, k=k: kth_largest(part[0], part[1], k, reduce))
            assert value == values[order[k - 1]]
    assert not top_k_mask(values, mask, 0, own, lambda tensor: tensor).any()


def test_largest_of_extreme_numbers() -> None:
    values = torch.tensor([0.0, -0.0, 5e-324, -1e308, 1e308, -5e-324], dtype=torch.float64)
    everything = torch.ones(6, dtype=torch.bool)
    found = [kth_largest(values, everything, k, lambda tensor: tensor).item() for k in range(1, 7)]
    assert found == [1e308, 5e-324, 0.0, 0.0, -5e-324, -1e308]


@pytest.mark.parametrize("part", [0.05, 0.2, 0.3, 0.5, 0.7, 1.0])
def test_highest_is_the_quantile_of_torch(part: float) -> None:
    for num in (1, 2, 11, 60):
        values, mask, _ = _draw(num, seed=num)
        want = mask & (values >= torch.quantile(values[mask], 1 - part) - 1e-12)
        parts = [(values[:1], mask[:1]), (values[1:], mask[1:])]
        found = on_values(parts, lambda one, reduce: highest(one[0], one[1], part, reduce))
        assert torch.equal(torch.cat(found), want)
    assert not highest(values, torch.zeros_like(mask), part, lambda tensor: tensor).any()
