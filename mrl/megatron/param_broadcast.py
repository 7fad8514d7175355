"""Broadcast of parameters to their copies on other data-parallel ranks.

A dense parameter is replicated over all data-parallel and context-parallel ranks, an expert's over the ranks with the
same expert. The routers' biases of the selection are dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.megatron.model import ScoringModel


def first_here(chunks: Sequence[ScoringModel]) -> set[str]:
    """Returns the names of the parameters of which this rank has the first copy; it loads them."""
    return {name for name, group in _groups(chunks).items() if dist.get_rank(group) == 0}


def broadcast_params(chunks: Sequence[ScoringModel], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Collective over the job: copies each parameter from the first rank that has it to the others.

    Args:
        chunks: Model chunks of this rank.
        tensors: Parameters by name, all or some of them, or other tensors of the same names, shapes and dtypes; filled
            in place.
        device: Device on which the broadcast runs.
    """
    for name, group in _groups(chunks).items():
        if name in tensors and dist.get_world_size(group) > 1:
            on_device = tensors[name].to(device).contiguous()
            dist.broadcast(on_device, group=group, group_src=0)
            if on_device is not tensors[name]:
                tensors[name].copy_(on_device)


def _groups(chunks: Sequence[ScoringModel]) -> dict[str, dist.ProcessGroup]:
    """Returns the ranks that have each parameter, in the same order on all of them."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    return {
        f"chunk{index}.{name}": dense if getattr(tensor, "allreduce", True) else expert
        for index, chunk in enumerate(chunks)
        for name, tensor in chunk.named_weights()
    }
