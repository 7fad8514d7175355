"""A few updates on real ranks, and whether they are those of another layout."""

import math

import torch

from tests.megatron.actors import full_weights, make_policy, train
from tests.ranks import run_ranks

STEPS = 3
RELATIVE = 1e-4  # the bound: fp32 sums in another order, over three steps of Adam
ABSOLUTE = 2e-6  # losses and differences around zero
WEIGHTS = 2e-4  # Adam divides rounding by the size of tiny gradients: up to a fifth of one step of 1e-3


def _trained(arch, grid, options):
    policy = make_policy(arch, grid, **options)
    metrics = train(policy, STEPS)
    return metrics, full_weights(policy)


def run(arch, grid, **options):
    """What all ranks agree on: metrics of each step, weights after the last."""
    first, *others = run_ranks(grid.world_size, _trained, arch, grid, options)
    for metrics, _ in others:
        assert metrics == first[0]
    return first


def assert_same(found, expected):
    for step, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), (
                step, key, ours[key], theirs[key],
            )  # fmt: skip
    assert found[1].keys() == expected[1].keys()
    for key, weight in found[1].items():
        torch.testing.assert_close(weight, expected[1][key], rtol=0, atol=WEIGHTS, msg=key)
