"""Updates of a mixture of experts do not depend on the layout."""

import gc
import math
import weakref

import pytest
import torch

from mrl.grid import Grid
from tests.megatron.actors import (
    CONSTANT,
    EXPERT_LAYOUTS,
    SHALLOW_MIXTURE,
    algorithm,
    full_weights,
    make_batch,
    make_policy,
    train,
)
from tests.ranks import run_ranks

STEPS = 3
RELATIVE = 1e-4  # the bound: fp32 sums in another order, over three steps of Adam
ABSOLUTE = 2e-6  # losses and differences around zero
BF16 = 0.05  # bf16 has 8 bits, and some tokens go to other experts
WEIGHTS = 2e-4  # Adam divides rounding by the size of tiny gradients: up to a fifth of one step of 1e-3


def trained(grid, options):
    policy = make_policy(SHALLOW_MIXTURE, grid, **options)
    metrics = train(policy, STEPS)
    return metrics, full_weights(policy)


def run(grid, **options):
    """What all ranks agree on: metrics of each step, weights after the last."""
    first, *others = run_ranks(grid.world_size, trained, grid, options)
    for metrics, _ in others:
        assert metrics == first[0]
    return first


@pytest.fixture(scope="module")
def single():
    return run(Grid(1))


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


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "ep4", "tp2_ep2_etp2", "ep2_pp2", "tp2_ep2_pp2"])
def test_three_updates_are_those_of_one_rank(layout, single):
    """Experts have data-parallel groups, an optimizer and a part of the gradient norm of their own."""
    assert_same(run(EXPERT_LAYOUTS[layout]), single)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("ep2_dp2", {"overlap_grad_reduce": True}),
        ("ep2_dp2", {"use_distributed_optimizer": False}),
        ("tp2_ep2", {"recompute": "full", "max_tokens_per_microbatch": 24}),
        ("ep2", {"recompute": "selective", "moe_token_dispatcher_type": "allgather"}),
    ],
    ids=str,
)
def test_overlap_recomputation_packing_and_dispatcher_change_nothing(layout, options, single):
    assert_same(run(EXPERT_LAYOUTS[layout], actor=options), single)


def test_bf16_is_near_fp32(single):
    found, _ = run(EXPERT_LAYOUTS["tp2_ep2"], dtype="bfloat16")
    for ours, theirs in zip(found, single[0], strict=True):
        assert math.isclose(ours["actor/entropy"], theirs["actor/entropy"], rel_tol=BF16)
        assert math.isclose(ours["actor/moe_router_entropy"], theirs["actor/moe_router_entropy"], rel_tol=BF16)


def lonely(grid):
    policy = make_policy(SHALLOW_MIXTURE, grid)
    policy.start_optimizer(CONSTANT)
    batch = make_batch()
    return policy.update(batch if policy._groups.coords.dp == 0 else batch.select([]), algorithm())


def test_a_rank_without_sequences_computes_its_experts():
    expected = run_ranks(1, lonely, Grid(1))[0]
    for metrics in run_ranks(2, lonely, EXPERT_LAYOUTS["ep2"]):
        for key, value in expected.items():
            assert math.isclose(metrics[key], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE), key


def is_gone():
    """Whether an actor's model is freed when the actor is dropped after training."""
    policy = make_policy(SHALLOW_MIXTURE, Grid(2, ep=2))
    train(policy, 1)
    model = weakref.ref(policy.chunks[0])
    del policy
    gc.collect()
    return model() is None


def test_a_dropped_actor_is_gone():
    """A graph that a module keeps would hold the model, its groups and their threads for ever."""
    assert run_ranks(2, is_gone) == [True, True]
