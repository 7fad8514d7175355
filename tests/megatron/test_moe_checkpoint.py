"""A checkpoint of a mixture of experts loads where the experts lie otherwise, and training goes on."""

import math

import pytest
import torch

from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.megatron import checkpoint
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    BIASED_MIXTURE,
    EXPERT_LAYOUTS,
    HALF_DENSE_MIXTURE,
    MIXTURES,
    SHALLOW_MIXTURE,
    SINKS_MIXTURE,
    adam_steps,
    full_weights,
    make_policy,
    train,
)
from tests.ranks import run_ranks

RELATIVE = 1e-4  # fp32 sums in another order, after a step of Adam
ABSOLUTE = 2e-6  # losses around zero
BEFORE, AFTER = 2, 1
RATE = LearningRate(1e-3, 0.0, "linear", 0, BEFORE + AFTER)
LAYOUTS = {"single": ParallelLayout(1), "tp2_pp2": ParallelLayout(4, tp=2, pp=2), **EXPERT_LAYOUTS}
CASES = [
    ("tp2_ep2_etp2", ["single", "ep4", "tp2_pp2"]),
    ("single", ["ep2"]),
    ("ep2_pp2", ["single", "ep2", "tp2_ep2_pp2"]),
]


def saved(folder, grid, arch=SHALLOW_MIXTURE):
    """Trains, saves, trains on: weights at the save and metrics behind it."""
    policy = make_policy(arch, grid)
    for name, tensor in policy.named_tensors().items():
        if "expert_bias" in name:
            tensor.copy_(torch.linspace(-0.2, 0.3, tensor.numel()))
    policy.start_optimizer(RATE)
    train(policy, BEFORE)
    checkpoint.save(folder, policy)
    weights = full_weights(policy)
    return weights, train(policy, AFTER, first=BEFORE)


def resumed(folder, grid, arch=SHALLOW_MIXTURE):
    policy = make_policy(arch, grid, seed=None)
    policy.start_optimizer(RATE)
    checkpoint.load(folder, policy)
    weights = full_weights(policy)
    steps = {float(step) for step in adam_steps(policy)}
    return weights, train(policy, AFTER, first=BEFORE), len(policy.optimizer.chained_optimizers), steps


@pytest.mark.slow
@pytest.mark.parametrize(("source", "targets"), [("single", ["tp2_ep2", "ep2_pp2"]), ("tp2_ep2", ["single", "ep4"])])
def test_sinks_and_biases_of_experts_go_on_where_they_lie_otherwise(source, targets, tmp_path):
    test_training_goes_on_where_the_experts_lie_otherwise(SINKS_MIXTURE, source, targets, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "targets"), CASES, ids=[source for source, _ in CASES])
@pytest.mark.parametrize(
    "arch",
    [SHALLOW_MIXTURE, BIASED_MIXTURE, HALF_DENSE_MIXTURE, MIXTURES["deepseek_v3"]],
    ids=["every layer", "but the first", "half", "latent"],
)
def test_training_goes_on_where_the_experts_lie_otherwise(arch, source, targets, tmp_path):
    folder = tmp_path / "actor"
    weights, metrics = run_ranks(LAYOUTS[source].world_size, saved, folder, LAYOUTS[source], arch)[0]
    for target in targets:
        grid = LAYOUTS[target]
        for found, stepped, num_optimizers, steps in run_ranks(grid.world_size, resumed, folder, grid, arch):
            assert found.keys() == weights.keys()
            assert any("correction_bias" in key for key in found) == (arch.moe.score_bias)
            assert all(torch.equal(found[key], weights[key]) for key in weights), target
            assert num_optimizers == (2 if grid.ep > 1 else 1)
            assert steps == {float(BEFORE)}
            for ours, theirs in zip(stepped, metrics, strict=True):
                for key in theirs:
                    assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), (target, key)


PLAIN = {"use_distributed_optimizer": False}


def saved_plain(folder):
    policy = make_policy(SHALLOW_MIXTURE, EXPERT_LAYOUTS["ep2"], actor=PLAIN)
    policy.start_optimizer(RATE)
    train(policy, 1)
    checkpoint.save(folder, policy)
    expected = train(policy, 1, first=1)
    again = make_policy(SHALLOW_MIXTURE, EXPERT_LAYOUTS["ep2"], seed=None, actor=PLAIN)
    again.start_optimizer(RATE)
    checkpoint.load(folder, again)
    return expected, train(again, 1, first=1)


def elsewhere(folder, grid, actor):
    policy = make_policy(SHALLOW_MIXTURE, grid, seed=None, actor=actor)
    policy.start_optimizer(RATE)
    checkpoint.load(folder, policy)
    return train(policy, 1, first=1)


def test_an_optimizer_that_is_not_distributed_loads_where_the_experts_lie_otherwise(tmp_path):
    results = run_ranks(2, saved_plain, tmp_path / "actor")
    assert all(found == expected for expected, found in results)
    wanted = results[0][0][0]
    for layout, actor in (("single", PLAIN), ("single", {}), ("tp2", {})):
        for found in run_ranks(LAYOUTS[layout].world_size, elsewhere, tmp_path / "actor", LAYOUTS[layout], actor):
            for key, value in wanted.items():
                assert math.isclose(found[0][key], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE), (layout, actor, key)
