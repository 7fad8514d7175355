"""The dry run's estimate of memory is what real actors hold."""

import math

import pytest
import torch

from mrl.config import Config
from mrl.dryrun import memory
from mrl.grid import Grid
from tests.megatron.actors import ARCHS, LAYOUTS, config_for, make_policy, train
from tests.ranks import run_ranks

RELATIVE = 0.02  # buffers are filled up so that data-parallel ranks own equal parts; Adam's step counters


def held(name, grid, options):
    """Bytes of weights, gradients and optimizer of this rank after an update."""
    policy = make_policy(ARCHS[name], grid, **options)
    train(policy, 1)
    weights = sum(tensor.nbytes for tensor in policy.named_tensors().values())
    gradients = sum(buffer.grad_data.nbytes for wrapped in policy._wrapped for buffer in wrapped.buffers)
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    optimizer = 0
    own = {tensor.untyped_storage().data_ptr() for tensor in policy.named_tensors().values()}
    own |= {
        buffer.param_data.untyped_storage().data_ptr()
        for w in policy._wrapped
        for buffer in w.buffers
        if buffer.param_data is not None
    }
    for part in parts:
        for parameter, state in part.optimizer.state.items():
            optimizer += sum(value.nbytes for value in state.values() if torch.is_tensor(value))
            if parameter.untyped_storage().data_ptr() not in own:
                optimizer += parameter.nbytes
    return weights, gradients, optimizer


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ("single", "qwen2", {}),
        ("dp2", "qwen2", {"dtype": "bfloat16"}),
        ("dp2", "qwen2", {"actor": {"use_distributed_optimizer": False}}),
        ("tp2_pp2", "qwen3", {}),
    ],
)
def test_memory_is_what_a_rank_holds(layout, name, options):
    grid: Grid = LAYOUTS[layout]
    config: Config = config_for(grid, **options)
    estimates = memory(config, ARCHS[name], grid)
    for found, estimate in zip(run_ranks(grid.world_size, held, name, grid, options), estimates, strict=True):
        expected = (estimate.weights, estimate.gradients, estimate.optimizer)
        for ours, theirs in zip(expected, found, strict=True):
            assert math.isclose(ours, theirs, rel_tol=RELATIVE), (expected, found)
