"""Boxes, against masks of the elements that they hold."""

import itertools
import random

import pytest
import torch

from mrl.resharding.regions import (
    full_region,
    intersect,
    slices,
    split,
    subtract,
    subtract_intersection,
    translate,
    union_volume,
    volume,
)

SHAPE = (5, 4, 3)


def mask(*regions):
    """How often each element is held."""
    held = torch.zeros(SHAPE, dtype=torch.int64)
    for region in regions:
        held[slices(region)] += 1
    return held


def random_regions(count, seed):
    draw = random.Random(seed)
    return [tuple(tuple(sorted(draw.sample(range(size + 1), 2))) for size in SHAPE) for _ in range(count)]


PAIRS = list(itertools.pairwise(random_regions(60, 0)))


def test_intersection_holds_what_both_hold():
    for a, b in PAIRS:
        both = intersect(a, b)
        expected = mask(a) * mask(b)
        assert torch.equal(mask(both) if both else torch.zeros_like(expected), expected)


def test_difference_is_disjoint_and_holds_the_rest():
    for a, b in PAIRS:
        assert torch.equal(mask(*subtract_intersection(a, b)), mask(a) * (1 - mask(b)))


def test_subtracting_all_leaves_nothing():
    assert subtract(full_region(SHAPE), full_region(SHAPE)) == []


def test_union_counts_each_element_once():
    for start in range(0, 60, 4):
        regions = random_regions(60, 1)[start : start + 4]
        assert union_volume(regions) == int((mask(*regions) > 0).sum())


@pytest.mark.parametrize("most", [1, 2, 3, 7, 12, 13, 59, 60, 1000])
def test_parts_are_small_enough_and_hold_everything_once_in_row_major_order(most):
    region = ((1, 5), (0, 4), (1, 3))
    parts = list(split(region, most))
    assert max(map(volume, parts)) <= most
    assert torch.equal(mask(*parts), mask(region))
    numbers = torch.arange(torch.Size(SHAPE).numel()).view(SHAPE)
    assert torch.equal(
        torch.cat([numbers[slices(part)].flatten() for part in parts]), numbers[slices(region)].flatten()
    )


def test_translation_keeps_the_place_inside_the_piece():
    assert translate(((3, 4), (6, 9)), ((2, 5), (5, 9)), ((10, 13), (0, 4))) == ((11, 12), (1, 4))
