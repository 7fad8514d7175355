"""Megatron's parallel state for a `ParallelLayout`, as mrl's `ProcessGroups`.

All code takes groups from the returned bundle; only Megatron itself reads its globals.
"""

from __future__ import annotations

import gc
import math

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mrl.distributed.groups import ProcessGroups, make_role_groups, make_rollout_group, single_rank_group
from mrl.distributed.subset_groups import sync_group_counter, use_as_world
from mrl.parallel_layout import ParallelLayout

MARGIN_MINUTES = 2
"""Margin of Megatron's timeout beyond mrl's. NCCL's timeout ends a process without an error message, and counts from
when a collective is enqueued."""

_own_groups: list[dist.ProcessGroup] = []
"""Groups that `initialize` created in addition to Megatron's."""


def initialize(
    grid: ParallelLayout, *, seed: int, timeout_s: float = 600.0, sampling_s: float = 600.0
) -> ProcessGroups:
    """Collective over the job: creates the process groups of `grid`; destroys those of an earlier layout.

    Args:
        grid: Parallel layout; its `world_size` is the job's.
        seed: Seed of Megatron's random states, from which each tensor- and pipeline-parallel rank derives its own.
        timeout_s: Timeout of collectives, s; a margin of minutes is added, and Megatron rounds up to minutes.
        sampling_s: Timeout of collectives among ranks that only sample, s.

    Raises:
        RuntimeError: The job has another size, or Megatron orders ranks differently from `grid`.
    """
    if dist.get_world_size() != grid.world_size:
        raise RuntimeError(f"the job has {dist.get_world_size()} ranks, the grid {grid.world_size}")
    destroy()
    rank, more_s = dist.get_rank(), 60 * MARGIN_MINUTES
    trainers, samplers = make_role_groups(grid, timeout_s + more_s, sampling_s + more_s)
    rollout_tp = make_rollout_group(grid, rank)
    _own_groups.append(rollout_tp)
    role = trainers if rank in grid.trainers else samplers
    if role is not None:
        _own_groups.append(role)
    if rank in grid.trainers:
        with use_as_world(trainers):
            _make_megatron_groups(grid, seed, timeout_s)
    if trainers is not None:
        sync_group_counter()
    if rank not in grid.trainers:
        single = single_rank_group(rank)
        _own_groups.append(single)
        return ProcessGroups(rank, grid, single, single, single, single, single, rollout_tp, trainers, samplers)
    groups = ProcessGroups(
        rank=rank,
        grid=grid,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        rollout_tp=rollout_tp,
        trainers=trainers,
        samplers=samplers,
    )
    _check_order(grid, rank)
    return groups


def _make_megatron_groups(grid: ParallelLayout, seed: int, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expert_tp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60) + MARGIN_MINUTES,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _check_order(grid: ParallelLayout, rank: int) -> None:
    """Raises RuntimeError if Megatron orders ranks differently from the grid."""
    coords, experts = grid.coords(rank), grid.expert_coords(rank)
    expected = {
        "tensor": (parallel_state.get_tensor_model_parallel_group(), coords.tp),
        "context": (parallel_state.get_context_parallel_group(), coords.cp),
        "data": (parallel_state.get_data_parallel_group(), coords.dp),
        "pipeline": (parallel_state.get_pipeline_model_parallel_group(), coords.pp),
        "expert tensor": (parallel_state.get_expert_tensor_parallel_group(), experts.etp),
        "expert": (parallel_state.get_expert_model_parallel_group(), experts.ep),
        "expert data": (parallel_state.get_expert_data_parallel_group(), experts.edp),
    }
    found = {name: dist.get_rank(group) for name, (group, _) in expected.items()}
    if any(found[name] != index for name, (_, index) in expected.items()):
        raise RuntimeError(f"rank {rank} is at {found} for Megatron, but at {coords} and {experts} in the grid")


def destroy() -> None:
    """Collective over the job: destroys the groups that `initialize` and Megatron created, if any."""
    made = [*_own_groups]
    if parallel_state.is_initialized():
        made += parallel_state._global_process_group_list or []
    if not made:
        return
    gc.collect()  # models and optimizers reference groups in cycles; a referenced gloo group keeps its threads
    for group in dict.fromkeys(made):
        if group is not None:  # None is the default group
            dist.destroy_process_group(group)
    _own_groups.clear()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
