"""Megatron's own save and load on real ranks, with which mrl's reader and writer are compared; inside `run_ranks`."""

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.megatron import checkpoint
from mrl.megatron.checkpoint import dist_checkpointing, parallel_state
from tests.megatron.actors import CONSTANT, full_weights, make_policy

EXTRA_STATE = "_extra_state"


def states(policy, spelling: dict) -> dict:
    """Everything that Megatron would save of the model, extra states too."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**spelling, "dp_cp_group": group}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(policy.chunks)}


def saved(folder, arch, grid, spelling: dict) -> dict[str, Tensor]:
    """Saves a random model; its Hugging Face tensors."""
    policy = make_policy(arch, grid)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(states(policy, spelling), str(folder))
    return full_weights(policy)


def loaded(folder, arch, grid) -> dict[str, Tensor]:
    """Loads with Megatron alone, and demands everything that a model of this layout asks for."""
    policy = make_policy(arch, grid, seed=None)
    found = dist_checkpointing.load(states(policy, {}), str(folder))
    for index, chunk in enumerate(policy.chunks):
        missing = chunk.load_state_dict(found[f"model{index}"], strict=False).missing_keys
        if [name for name in missing if EXTRA_STATE not in name]:
            raise AssertionError(missing)
    return full_weights(policy)


def resumed(folder, arch, grid) -> dict[str, Tensor]:
    """Loads as a run of mrl does."""
    policy = make_policy(arch, grid, seed=None)
    checkpoint.load(folder, policy)
    return full_weights(policy)


def committed(folder, arch, grid) -> dict[str, Tensor]:
    """Saves as a run of mrl does, with an optimizer."""
    policy = make_policy(arch, grid)
    policy.start_optimizer(CONSTANT)
    checkpoint.save(folder, policy)
    return full_weights(policy)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
