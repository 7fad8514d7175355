"""Megatron's parallel state for a `Grid`, as mrl's `ProcessGroups`.

Owns the one call of Megatron's global initialisation and its undoing. Everything above takes groups from the returned
bundle; Megatron itself reads its globals.
"""

from __future__ import annotations

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mrl.distributed.groups import ProcessGroups, make_rollout_group
from mrl.grid import Grid

_rollout_groups: list[dist.ProcessGroup] = []
"""What `initialize` made beside Megatron's groups."""


def initialize(grid: Grid, *, seed: int, timeout_s: float = 600.0) -> ProcessGroups:
    """Collective over the job: makes the groups of `grid`; a layout that was there before is destroyed.

    Args:
        grid: `world_size` is the job's.
        seed: Of Megatron's random states; each tensor- and pipeline-parallel rank gets one of its own from it.
        timeout_s: A collective that waits longer fails, s.

    Raises:
        RuntimeError: The job has another size, or Megatron orders ranks differently from `grid`.
    """
    if dist.get_world_size() != grid.world_size:
        raise RuntimeError(f"the job has {dist.get_world_size()} ranks, the grid {grid.world_size}")
    destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    rank = dist.get_rank()
    rollout_tp = make_rollout_group(grid, rank)
    _rollout_groups.append(rollout_tp)
    groups = ProcessGroups(
        rank=rank,
        grid=grid,
        tp=parallel_state.get_tensor_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        rollout_tp=rollout_tp,
    )
    place = (dist.get_rank(groups.tp), dist.get_rank(groups.dp), dist.get_rank(groups.pp))
    if place != (groups.coords.tp, groups.coords.dp, groups.coords.pp):
        raise RuntimeError(f"rank {rank}: Megatron has it at (tp, dp, pp) = {place}, the grid at {groups.coords}")
    return groups


def destroy() -> None:
    """Collective over the job: closes the groups that `initialize` had Megatron make, if any."""
    if not parallel_state.is_initialized():
        return
    made = [*(parallel_state._global_process_group_list or []), *_rollout_groups]
    gc.collect()  # models and optimizers hold groups in reference cycles; a gloo group that is held keeps its threads
    for group in dict.fromkeys(made):
        if group is not None:  # None stands for the default group
            dist.destroy_process_group(group)
    _rollout_groups.clear()
    parallel_state.destroy_model_parallel()
