"""Updates of a mixture of experts do not depend on the layout; their losses and measures are what they say."""

import math

import pytest
import torch

from mrl.grid import Grid
from tests.megatron.actors import EXPERT_LAYOUTS, MIXTURES, full_weights, make_policy, train
from tests.ranks import run_ranks

STEPS = 3
RELATIVE = 1e-4  # the bound: fp32 sums in another order, over three steps of Adam
ABSOLUTE = 2e-6  # losses and differences around zero
WEIGHTS = 2e-4  # Adam divides rounding by the size of tiny gradients: up to a fifth of one step of 1e-3


def trained(grid, name, options):
    policy = make_policy(MIXTURES[name], grid, **options)
    metrics = train(policy, STEPS)
    return metrics, full_weights(policy)


def run(grid, name, **options):
    """What all ranks agree on: metrics of each step, weights after the last."""
    first, *others = run_ranks(grid.world_size, trained, grid, name, options)
    for metrics, _ in others:
        assert metrics == first[0]
    return first


@pytest.fixture(scope="module")
def single():
    known = {}
    return lambda name, **options: known.setdefault((name, str(options)), run(Grid(1), name, **options))


def assert_same(found, expected, relative=RELATIVE):
    for step, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert math.isclose(ours[key], theirs[key], rel_tol=relative, abs_tol=ABSOLUTE), (
                step, key, ours[key], theirs[key],
            )  # fmt: skip
    assert found[1].keys() == expected[1].keys()
    for key, weight in found[1].items():
        torch.testing.assert_close(weight, expected[1][key], rtol=0, atol=WEIGHTS, msg=key)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_three_updates_are_those_of_one_rank(layout, single):
    assert_same(run(EXPERT_LAYOUTS[layout], "qwen2_moe"), single("qwen2_moe"))
