"""Process groups that ranks of tests keep: who is given a layout again takes what was made for it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mrl.distributed.groups import ProcessGroups
from mrl.megatron import parallel_state as parallel
from mrl.megatron.forward_backward import ForwardBackward
from mrl.parallel_layout import ParallelLayout

MOST = 6
"""Layouts that are kept: each of their groups has threads."""

_kept: dict[ParallelLayout, tuple[ProcessGroups, dict[str, Any]]] = {}
"""Layout -> its groups, and what Megatron's globals say of it."""
_globals: list[dict[str, Any]] = []
"""Megatron's, of no layout."""
_broken = [False]
"""Whether a pipeline was left by an error: messages that nobody took would be taken by the next one."""


def groups_of(grid: ParallelLayout, seed: int = 0) -> ProcessGroups:
    """Collective over the job: as `parallel.initialize(grid, seed=seed)`, and others that were made here stay.

    Whoever calls `parallel.initialize` or `parallel.destroy` ends them all.
    """
    if any(groups.rollout_tp not in parallel._own_groups for groups, _ in _kept.values()):
        _kept.clear()
    usable = torch.tensor(int(bool(_kept) and not _broken[0] and (grid in _kept or len(_kept) < MOST)))
    dist.all_reduce(usable, op=dist.ReduceOp.MIN)
    if not usable:
        parallel.destroy()
        _kept.clear()
        _globals[:] = [_state()]
        _broken[0] = False
    if grid in _kept:
        groups, state = _kept[grid]
        vars(parallel_state).update(state)
        if groups.is_trainer:
            model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        return groups
    others = parallel._own_groups.copy()
    parallel._own_groups.clear()
    vars(parallel_state).update(_globals[0])
    groups = parallel.initialize(grid, seed=seed)
    parallel._own_groups += [*others, *(parallel_state._global_process_group_list or [])]
    _kept[grid] = groups, _state()
    return groups


def _state() -> dict[str, Any]:
    named = vars(parallel_state).items()
    return {name: value for name, value in named if name == "_global_process_group_list" or name.isupper()}


def _told(run: Any) -> Any:
    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            _broken[0] = True
            raise

    return watched


ForwardBackward.run = _told(ForwardBackward.run)  # type: ignore[method-assign]
