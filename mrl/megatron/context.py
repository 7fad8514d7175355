"""Context parallelism: the tokens of a microbatch split over ranks.

Owns which tokens a rank computes, what its queries see in `CoreAttention`, and the exchange of keys, values and scores.
Everything in a model but attention is per token, so a rank may hold any tokens; it holds two runs that together cost
as much as any other rank's: the packed tokens are cut into 2 x size equal runs, and rank r has runs r and
2 x size - 1 - r.

TransformerEngine's own attention exchanges keys and values where no two sequences share a token, and then each sequence
is cut that way by itself.

Shapes: P packed tokens of all ranks, n of them on this rank, B runs of queries, R scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.data.prefixes import Prefixes

MAX_PADDING = 0.5
"""Longest part of a group's scores that may be padding."""


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
class QueryGroup:
    """Runs of this rank's queries that are attended together.

    Attributes:
        queries_BQ: Rows of this rank; padding repeats a run's last query.
        keys_BT: Rows of all ranks' keys, as they are gathered; padding repeats a run's last key.
        sees_BQT: Which keys a query sees.
    """

    queries_BQ: Tensor
    keys_BT: Tensor
    sees_BQT: Tensor


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of a microbatch.

    Attributes:
        group: The ranks that share the microbatch.
        groups: Its queries.
        row_of_query: For each of this rank's tokens its place among all groups' queries.
    """

    group: dist.ProcessGroup
    groups: list[QueryGroup]
    row_of_query: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Collective over the group: all ranks' keys or values [P, ...], rank by rank; differentiable."""
        gathered: Tensor = gather_from_sequence_parallel_region(rows.contiguous(), group=self.group)
        return gathered


def context_shard(
    group: dist.ProcessGroup, lens: Sequence[int], prefixes: Prefixes, device: torch.device
) -> ContextShard:
    """What this rank's queries see.

    Args:
        group: The ranks that share the microbatch.
        lens: Packed tokens of each sequence, filling included as a sequence.
        prefixes: Which of them are computed; as many distinct ones as a multiple of twice the group's size.
        device: Of the index tensors.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    groups = [_group(members, device) for members in _similar(own_runs(size, rank, lens, prefixes))]
    row_of_query = torch.empty(prefixes.origin_D.numel() // size, dtype=torch.int64)
    offset = 0
    for found in groups:
        row_of_query[found.queries_BQ.flatten().cpu()] = torch.arange(offset, offset + found.queries_BQ.numel())
        offset += found.queries_BQ.numel()
    return ContextShard(group, groups, row_of_query.to(device))


class Run(NamedTuple):
    """Rows of a rank that follow one another in a sequence.

    Attributes:
        queries: Which of this rank's rows they are.
        keys: Rows of the tokens that the last of them sees, as all ranks' are gathered.
        positions: Of the queries among the keys.
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor


def own_runs(size: int, rank: int, lens: Sequence[int], prefixes: Prefixes) -> list[Run]:
    """The runs of a rank of `size`, arguments as for `context_shard`; each of its rows is in one of them."""
    count = prefixes.origin_D.numel()
    place = torch.empty(count, dtype=torch.int64)  # of a distinct token, among the gathered rows
    place[torch.cat([own_rows(count, size, other) for other in range(size)])] = torch.arange(count)
    mine = place // (count // size) == rank
    runs = []
    start = 0
    for length in lens:
        tokens = prefixes.distinct_P[start : start + length]
        first_own = (prefixes.origin_D[tokens] == torch.arange(start, start + length)) & mine[tokens]
        positions = first_own.nonzero().squeeze(1)
        for run in _consecutive(positions):
            runs.append(Run(place[tokens[run]] - rank * (count // size), place[tokens[: int(run[-1]) + 1]], run))
        start += length
    return runs


def _consecutive(positions: Tensor) -> list[Tensor]:
    """Runs of positions that follow one another."""
    if not positions.numel():
        return []
    breaks = (positions.diff() != 1).nonzero().squeeze(1) + 1
    return list(positions.tensor_split(breaks))


def _similar(runs: list[Run]) -> list[list[Run]]:
    """Runs in groups, longest first, in which at most `MAX_PADDING` of the scores are padding."""
    groups: list[list[Run]] = []
    used = 0
    for run in sorted(runs, key=lambda item: (-item.keys.numel(), -item.queries.numel())):
        cost = run.queries.numel() * run.keys.numel()
        if groups:
            members = groups[-1]
            widest = max(run.queries.numel(), *(item.queries.numel() for item in members))
            if used + cost >= (1 - MAX_PADDING) * (len(members) + 1) * widest * members[0].keys.numel():
                members.append(run)
                used += cost
                continue
        groups.append([run])
        used = cost
    return groups


def _group(runs: list[Run], device: torch.device) -> QueryGroup:
    width = max(queries.numel() for queries, _, _ in runs)
    length = max(keys.numel() for _, keys, _ in runs)
    queries_BQ = torch.stack([queries[torch.arange(width).clamp(max=queries.numel() - 1)] for queries, _, _ in runs])
    keys_BT = torch.stack([keys[torch.arange(length).clamp(max=keys.numel() - 1)] for _, keys, _ in runs])
    at_BQ = torch.stack([at[torch.arange(width).clamp(max=at.numel() - 1)] for _, _, at in runs])
    sees_BQT = torch.arange(length) <= at_BQ[..., None]
    return QueryGroup(queries_BQ.to(device), keys_BT.to(device), sees_BQT.to(device))


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
