"""Parameters that several data-parallel ranks hold alike: one of them reads, the others receive.

Owns which ranks these are: for a dense parameter those of other data, for an expert's those that hold the same expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.megatron.model import ScoringModel


def first_here(chunks: Sequence[ScoringModel]) -> set[str]:
    """Names, as of `named_tensors`, of the parameters that this rank holds as the first of all that hold them."""
    return {name for name, group in _groups(chunks).items() if dist.get_rank(group) == 0}


def share(chunks: Sequence[ScoringModel], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Collective over the job: every rank gets the values of the first one that holds a parameter.

    Args:
        chunks: Of this rank.
        tensors: Its parameters by name, or others of the same names, shapes and dtypes; filled in place.
        device: By which they travel.
    """
    for name, group in _groups(chunks).items():
        if dist.get_world_size(group) > 1:
            travelling = tensors[name].to(device).contiguous()
            dist.broadcast(travelling, group=group, group_src=0)
            if travelling is not tensors[name]:
                tensors[name].copy_(travelling)


def _groups(chunks: Sequence[ScoringModel]) -> dict[str, dist.ProcessGroup]:
    """Of each parameter the ranks that hold it; in the same order on all of them."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    return {
        f"chunk{index}.{name}": dense if getattr(parameter, "allreduce", True) else expert
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
