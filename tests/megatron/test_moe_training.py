"""Updates of a mixture of experts do not depend on the layout."""

import gc
import math
import weakref

import pytest

from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    CONSTANT,
    EXPERT_LAYOUTS,
    SHALLOW_MIXTURE,
    algorithm,
    make_batch,
    make_policy,
    train,
)
from tests.megatron.trainings import ABSOLUTE, RELATIVE, assert_same, run
from tests.ranks import run_ranks

BF16 = 0.05  # bf16 has 8 bits, and some tokens go to other experts


@pytest.fixture(scope="module")
def single():
    return run(SHALLOW_MIXTURE, ParallelLayout(1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "ep4", "tp2_ep2_etp2", "ep2_pp2", "tp2_ep2_pp2"])
def test_three_updates_are_those_of_one_rank(layout, single):
    """Experts have data-parallel groups, an optimizer and a part of the gradient norm of their own."""
    assert_same(run(SHALLOW_MIXTURE, EXPERT_LAYOUTS[layout]), single)


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
    assert_same(run(SHALLOW_MIXTURE, EXPERT_LAYOUTS[layout], actor=options), single)


def test_bf16_is_near_fp32(single):
    found, _ = run(SHALLOW_MIXTURE, EXPERT_LAYOUTS["tp2_ep2"], dtype="bfloat16")
    for ours, theirs in zip(found, single[0], strict=True):
        assert math.isclose(ours["actor/entropy"], theirs["actor/entropy"], rel_tol=BF16)
        assert math.isclose(ours["actor/moe_router_entropy"], theirs["actor/moe_router_entropy"], rel_tol=BF16)


def lonely(grid):
    policy = make_policy(SHALLOW_MIXTURE, grid)
    policy.start_optimizer(CONSTANT)
    batch = make_batch()
    return policy.update(batch if policy._groups.coords.dp == 0 else batch.select([]), algorithm())


def test_a_rank_without_sequences_computes_its_experts():
    expected = run_ranks(1, lonely, ParallelLayout(1))[0]
    for metrics in run_ranks(2, lonely, EXPERT_LAYOUTS["ep2"]):
        for key, value in expected.items():
            assert math.isclose(metrics[key], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE), key


def is_gone():
    """Whether an actor's model is freed when the actor is dropped after training."""
    policy = make_policy(SHALLOW_MIXTURE, ParallelLayout(2, ep=2))
    train(policy, 1)
    model = weakref.ref(policy.chunks[0])
    del policy
    gc.collect()
    return model() is None


def test_a_dropped_actor_is_gone():
    """A graph that a module keeps would hold the model, its groups and their threads for ever."""
    assert run_ranks(2, is_gone) == [True, True]
