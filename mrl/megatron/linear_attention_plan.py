"""Order in which linear attention computes packed rows: its state passes from token to token of each sequence.

Sequences that share a prefix form trees. A node is a run of rows with one node before it, whose last state it starts
with; the nodes of a level have their predecessors in the level before and are computed together.

Shapes: D rows of the microbatch, and a row D of zeros for padding and for what is before a sequence; N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.data.shared_prefix import SharedPrefixes
from mrl.megatron.attention_segments import rank_segments
from mrl.megatron.deterministic_gather import RowGather, gather_plan
from mrl.types import ranges

MAX_PADDING = 0.25
"""Largest fraction of a group's tokens that may be padding."""
SMALL_GROUP_TOKENS = 1024
"""Number of tokens, padding included, up to which one group costs less than the calls for two smaller ones."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one level that are computed together, padded to the longest.

    Attributes:
        size: Number of nodes.
        rows: Gather of the group's tokens [size x longest] from rows and the row of zeros.
        states: Gather of the states before the nodes from the last states of the level before; None: they are zero.
    """

    size: int
    rows: RowGather
    states: RowGather | None


@dataclass(frozen=True)
class LinearAttentionPlan:
    """Plan of one microbatch.

    Attributes:
        taps: Gather of the rows that the convolution reads for each row, oldest first, [D x kernel].
        levels: Groups of nodes, level by level.
        slots: Gather of each row's output from the tokens of all groups.
    """

    taps: RowGather
    levels: list[list[NodeGroup]]
    slots: RowGather


def plan_linear_attention(
    lens: Sequence[int], prefixes: SharedPrefixes, kernel: int, device: torch.device
) -> LinearAttentionPlan:
    """Builds the plan.

    Args:
        lens: Packed tokens of each sequence, with the padding as a sequence.
        prefixes: Sharing of tokens: which of them are computed.
        kernel: Tokens that the convolution reads.
        device: Device of the index tensors.
    """
    segments = rank_segments(1, 0, lens, prefixes)
    row_P, count = segments.row_P, prefixes.origin_D.numel()
    # own tokens, segment after segment: each row once
    token_D = ranges(segments.begin_N, segments.end_N)
    first_D = segments.first_N.repeat_interleave(segments.end_N - segments.begin_N)
    begins_D = torch.zeros(count, dtype=torch.bool)
    begins_D[(segments.end_N - segments.begin_N).cumsum(0) - (segments.end_N - segments.begin_N)] = True
    branching = torch.zeros(count, dtype=torch.bool)
    continued = segments.begin_N > segments.first_N
    branching[row_P[segments.begin_N[continued] - 1]] = True
    begins_D[1:] |= branching[row_P[token_D[:-1]]]

    node_D = begins_D.cumsum(0) - 1
    node_of_row = torch.empty(count, dtype=torch.int64)
    node_of_row[row_P[token_D]] = node_D
    start_N = token_D[begins_D]
    length_N = torch.bincount(node_D)
    parent_N = torch.where(
        start_N > first_D[begins_D], node_of_row[row_P[(start_N - 1).clamp_min(0)]], torch.full_like(start_N, -1)
    )
    slots, offset = torch.empty(count, dtype=torch.int64), 0
    levels: list[list[NodeGroup]] = []
    place_N = torch.full_like(parent_N, -1)
    for members in _levels(parent_N):
        level, placed = [], 0
        earlier = int(place_N.max()) + 1 if levels else 0
        parents, place_N = place_N[parent_N[members]], torch.full_like(place_N, -1)
        for chosen in _similar(length_N[members]):
            nodes = members[chosen]
            longest = int(length_N[nodes].max())
            column = torch.arange(longest)
            inside = column < length_N[nodes][:, None]
            rows = torch.where(inside, row_P[(start_N[nodes][:, None] + column).clamp_max(row_P.numel() - 1)], count)
            slots[rows[inside]] = offset + inside.flatten().nonzero().squeeze(1)
            offset += rows.numel()
            states = gather_plan(parents[chosen], earlier, device) if levels else None
            level.append(NodeGroup(len(nodes), gather_plan(rows.flatten(), count + 1, device), states))
            place_N[nodes] = placed + torch.arange(len(nodes))
            placed += len(nodes)
        levels.append(level)
    return LinearAttentionPlan(
        gather_plan(_taps(token_D, first_D, row_P, kernel).flatten(), count + 1, device),
        levels,
        gather_plan(slots, offset, device),
    )


def _taps(token_D: Tensor, first_D: Tensor, row_P: Tensor, kernel: int) -> Tensor:
    """Returns the rows that the convolution reads for each row, [D, kernel]."""
    count = token_D.numel()
    read = token_D[:, None] + torch.arange(1 - kernel, 1)
    rows = torch.where(read >= first_D[:, None], row_P[read.clamp_min(0)], count)
    taps = torch.empty_like(rows)
    taps[row_P[token_D]] = rows
    return taps


def _levels(parent_N: Tensor) -> list[Tensor]:
    """Returns the nodes of each level, those without a parent first."""
    levels = [(parent_N < 0).nonzero().squeeze(1)]
    while True:
        children = torch.isin(parent_N, levels[-1]).nonzero().squeeze(1)
        if not children.numel():
            return levels
        levels.append(children)


def _similar(length_N: Tensor) -> list[Tensor]:
    """Groups nodes of similar length, longest first; returns indices."""
    groups: list[list[int]] = []
    used = 0
    lengths = length_N.tolist()
    for node in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups:
            slots = (len(groups[-1]) + 1) * lengths[groups[-1][0]]
            if slots <= SMALL_GROUP_TOKENS or used + lengths[node] >= (1 - MAX_PADDING) * slots:
                groups[-1].append(node)
                used += lengths[node]
                continue
        groups.append([node])
        used = lengths[node]
    return [torch.tensor(group) for group in groups]
