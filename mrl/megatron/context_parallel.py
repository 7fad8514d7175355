"""Context parallelism: the tokens of a microbatch split over ranks.

Owns which tokens a rank computes, and the exchange of scores; what its queries see is in `attention_segments.py`.
Everything in a model but attention is per token, so a rank may hold any tokens; it holds two runs that together cost
as much as any other rank's: the packed tokens are cut into 2 x size equal runs, and rank r has runs r and
2 x size - 1 - r.

TransformerEngine's own attention exchanges keys and values where no two sequences share a token, and then each sequence
is cut that way by itself.

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
    """The tokens of a rank among `count`, ascending; `count` is a multiple of 2 x `size`, unless that is 1."""
    if size == 1:
        return torch.arange(count)
    runs = torch.arange(count).view(2 * size, -1)
    return torch.cat([runs[rank], runs[2 * size - 1 - rank]])


def own_rows_by_sequence(lens: Sequence[int], size: int, rank: int) -> Tensor:
    """The same cut in each sequence, as TransformerEngine wants it; each length is a multiple of 2 x `size`."""
    start, parts = 0, []
    for length in lens:
        parts.append(start + own_rows(length, size, rank))
        start += length
    return torch.cat(parts)


@dataclass(frozen=True)
class ContextTargets:
    """Scores of all ranks from those of each.

    Attributes:
        group: The ranks that share the microbatch.
        most: Scored tokens of the rank that has most.
        slot_R: Rank x `most` + number of each scored token among its rank's.
    """

    group: dist.ProcessGroup
    most: int
    slot_R: Tensor

    def gather(self, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Collective over the group: each of the scores [R] of all ranks; the gradient goes to the rank's own."""
        gathered: tuple[Tensor, ...] = _Gather.apply(self, *scores)  # type: ignore[no-untyped-call]
        return gathered


def context_targets(group: dist.ProcessGroup, owner_R: Tensor, device: torch.device) -> ContextTargets:
    """Where each scored token's score comes from; `owner_R`: the rank that scores it."""
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
        whole = grads[0].new_zeros(len(grads), size * plan.most)
        whole[:, plan.slot_R] = torch.stack(grads)
        return None, *whole.view(len(grads), size, plan.most)[:, rank, : ctx.own].unbind()
