"""Context parallelism: the split of a microbatch's tokens over ranks, and the gathering of their scores.

Everything in a model except attention is per token, so a rank may compute any tokens. The packed tokens are cut into 2
x size equal segments, and rank r computes segments r and 2 x size - 1 - r, which balances the cost of causal attention.
`attention_segments.py` determines what their queries attend to.

If no two sequences share a token, TransformerEngine's own ring attention exchanges keys and values; then each sequence
is split this way separately.

Shapes: R scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_rows(count: int, size: int, rank: int) -> Tensor:
    """Returns the rows of a rank among `count`, ascending; `count` is a multiple of 2 x `size` unless `size` is 1."""
    if size == 1:
        return torch.arange(count)
    segments = torch.arange(count).view(2 * size, -1)
    return torch.cat([segments[rank], segments[2 * size - 1 - rank]])


def own_rows_by_sequence(lens: Sequence[int], size: int, rank: int) -> Tensor:
    """Returns the rows of a rank with each sequence split separately; each length is a multiple of 2 x `size`."""
    start, parts = 0, []
    for length in lens:
        parts.append(start + own_rows(length, size, rank))
        start += length
    return torch.cat(parts)


@dataclass(frozen=True)
class ContextTargets:
    """Gathers the scores of all ranks in order.

    Attributes:
        group: Context-parallel ranks, which share the microbatch.
        most: Largest number of scored tokens on a rank.
        slot_R: Index of each scored token in the gathered scores: rank x `most` + index on its rank.
    """

    group: dist.ProcessGroup
    most: int
    slot_R: Tensor

    def gather(self, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Collective over the group: gathers each score [R] from all ranks; gradients go to the rank's own tokens."""
        gathered: tuple[Tensor, ...] = _Gather.apply(self, *scores)  # type: ignore[no-untyped-call]
        return gathered


def context_targets(group: dist.ProcessGroup, owner_R: Tensor, device: torch.device) -> ContextTargets:
    """Builds `ContextTargets`; `owner_R` is the rank that scores each token."""
    slot_R = torch.empty_like(owner_R)
    counts = []
    for rank in range(dist.get_world_size(group)):
        own = (owner_R == rank).nonzero().squeeze(1)
        counts.append(own.numel())
        slot_R[own] = torch.arange(own.numel())
    most = max(1, *counts)
    return ContextTargets(group, most, (slot_R + owner_R * most).to(device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ContextTargets, *scores: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.own = plan, scores[0].numel()
        padded = scores[0].new_zeros(len(scores), plan.most)
        padded[:, : ctx.own] = torch.stack(scores)
        received = [torch.empty_like(padded) for _ in range(dist.get_world_size(plan.group))]
        dist.all_gather(received, padded, group=plan.group)
        return torch.stack(received, 1).flatten(1)[:, plan.slot_R].unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        size, rank = dist.get_world_size(plan.group), dist.get_rank(plan.group)
        grad_slots = grads[0].new_zeros(len(grads), size * plan.most)
        grad_slots[:, plan.slot_R] = torch.stack(grads)
        return None, *grad_slots.view(len(grads), size, plan.most)[:, rank, : ctx.own].unbind()
