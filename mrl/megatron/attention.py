"""Causal attention over packed sequences with torch's scaled_dot_product_attention.

Owns the core attention of the local layer spec (used where TransformerEngine is not installed) and the plan by which
packed tokens are laid out for it. Megatron's own core attention without TransformerEngine takes no packed sequences.

Shapes: n rows of a rank; B runs of a group, Q queries and T keys of its longest; N heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.data.shared_prefix import Prefixes
from mrl.megatron.attention_segments import Runs, own_runs
from mrl.megatron.router import Routing
from mrl.megatron.row_gather import Copies, copies
from mrl.models.kernels.sdpa import attend
from mrl.models.kernels.training import Angles, Families

MAX_PADDING = 0.25
"""Longest part of a group's scores that may be padding."""
SMALL_GROUP_TOKENS = 4096
"""A group with up to so many keys, padding included, costs less than the calls of two smaller ones."""

LONGEST_AT_ONCE = 32
"""Up to this length all scores at once cost less on a CPU than torch's fused kernel, which works block by block."""


@dataclass(frozen=True)
class QueryGroup:
    """Runs that are attended together, padded to the longest.

    Attributes:
        size: Runs.
        queries: Of the longest.
        keys: Of the longest.
        unseen: 0 where a query sees a key, else -inf, [B or 1, Q, T]; None: the runs are whole sequences, and causal.
        at_once: All scores are computed at once; `unseen` is [B or 1, T, Q] then.
    """

    size: int
    queries: int
    keys: int
    unseen: Tensor | None
    at_once: bool


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's description of packed sequences, and how to lay them out for `CoreAttention`.

    Attributes:
        groups: In the order of their slots.
        query_slots: Row of this rank in each slot of a query; padding repeats some row.
        row_to_slot: For each row of this rank the slot of a query that holds it, and whose output it gets.
        keys: Row among those of all ranks in each slot of a key.
        row_to_first: For each row of this rank the slot of its sequence's first key.
        positions: Of each row of this rank in its sequence.
        routing: What the routers of a mixture of experts must know; None for a dense model.
        group: The ranks that share the microbatch; None: this one has it alone.
        families: What compiled attention needs in place of groups, slots and keys; None: it does not compute this.
        angles: Of each row of this rank, for compiled attention; the model sets them.
    """

    groups: list[QueryGroup] = field(default_factory=list)
    query_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    row_to_slot: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    keys: Copies | None = None
    row_to_first: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    routing: Routing | None = None
    group: dist.ProcessGroup | None = None
    families: Families | None = None
    angles: Angles | None = None


def pack(
    lens: Sequence[int],
    prefixes: Prefixes,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> PackedSequences:
    """Sequences of which the distinct tokens lie in the order of their numbers, for `CoreAttention`.

    Megatron takes the rotary angles one row for each of these ("sbhd" with a batch of one).

    Args:
        lens: Tokens of each sequence, each at least 1, filling included as a sequence.
        prefixes: Which of them are distinct. Their numbers need not follow the order of the sequences, also where no
            two sequences share a token.
        device: Where the index tensors go.
        group: The ranks that share the microbatch; as many distinct tokens as a multiple of twice its size.
        dtype: Of queries and keys.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    runs = own_runs(size, rank, lens, prefixes)
    count = prefixes.origin_D.numel()
    packed = PackedSequences(qkv_format="sbhd", max_seqlen_q=max(lens), max_seqlen_kv=max(lens), group=group)
    query_parts, key_parts = [], []
    row_to_slot, row_to_first, positions = torch.empty(3, count // size, dtype=torch.int64)
    offset = key_offset = 0
    for members, is_whole in _similar(runs, extends=size == 1):
        first, begin, end = (tokens[members][:, None] for tokens in (runs.first_N, runs.begin_N, runs.end_N))
        start = first if is_whole else begin
        width, longest = int((end - start).max()), int((end - first).max())
        column, key_column = torch.arange(width)[None], torch.arange(longest)[None]
        rows_BQ = runs.row_P[torch.minimum(start + column, end - 1)] - runs.offset
        slots_BQ = offset + torch.arange(rows_BQ.numel()).view_as(rows_BQ)
        own = (start + column >= begin) & (start + column < end)
        row_to_slot[rows_BQ[own]] = slots_BQ[own]
        row_to_first[rows_BQ[own]] = (key_offset + torch.arange(len(members))[:, None] * longest).expand_as(own)[own]
        positions[rows_BQ[own]] = (start + column - first)[own]
        at_once = longest <= LONGEST_AT_ONCE and device.type == "cpu" and dtype == torch.float32
        unseen = None
        if not is_whole:
            before = start - first
            before = before[:1] if bool((before == before[0]).all()) else before  # one mask is enough
            sees = key_column[:, None] <= (before + column)[..., None]
            sees = sees.transpose(1, 2) if at_once else sees
            unseen = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf).to(device)
        packed.groups.append(QueryGroup(len(members), width, longest, unseen, at_once))
        query_parts.append(rows_BQ.flatten())
        key_parts.append(runs.row_P[torch.minimum(first + key_column, end - 1)].flatten())
        offset += rows_BQ.numel()
        key_offset += len(members) * longest
    packed.query_slots = torch.cat(query_parts).to(device)
    packed.row_to_slot, packed.row_to_first = row_to_slot.to(device), row_to_first.to(device)
    packed.positions = positions.to(device)
    packed.keys = copies(torch.cat(key_parts), count, device)
    return packed


def pack_compiled(lens: Sequence[int], prefixes: Prefixes, group: dist.ProcessGroup | None = None) -> PackedSequences:
    """As `pack`, for compiled attention."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    seen, longest = families(own_runs(size, rank, lens, prefixes)), max(lens)
    return PackedSequences(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, group=group, families=seen)


def families(runs: Runs) -> Families:
    """Runs by the sequence's first row: what sequences share begins with it."""
    root_N = runs.row_P[runs.first_N]
    order = root_N.argsort(stable=True)
    counts_F = torch.unique_consecutive(root_N[order], return_counts=True)[1]
    first_R, begin_R, end_R = runs.first_N[order], runs.begin_N[order], runs.end_N[order]
    bound_F = torch.cat([counts_F.new_zeros(1), counts_F.cumsum(0)])
    return Families(runs.row_P, first_R, begin_R, end_R, bound_F, runs.offset, int((end_R - first_R).max()))


def _similar(runs: Runs, *, extends: bool) -> list[tuple[Tensor, bool]]:
    """Runs in groups, longest first, and whether a group is of whole sequences; a group is small or has little padding.

    A kernel that is told to be causal computes half of the scores, one with a mask all of them: where it can be, a long
    run of more than half of its sequence is computed with the queries before it (`extends`).
    """
    queries_N, keys_N = runs.end_N - runs.begin_N, runs.end_N - runs.first_N
    whole_N = queries_N == keys_N
    if extends:
        whole_N |= (keys_N > LONGEST_AT_ONCE) & (2 * queries_N > keys_N)
    groups: list[tuple[list[int], bool]] = []
    used, widest = 0, 0
    queries, keys, whole = queries_N.tolist(), keys_N.tolist(), whole_N.tolist()
    for run in sorted(range(len(keys)), key=lambda index: (whole[index], -keys[index], -queries[index], index)):
        width = keys[run] if whole[run] else queries[run]
        cost = keys[run] * width
        if groups and groups[-1][1] == whole[run]:
            members, longest = groups[-1][0], keys[groups[-1][0][0]]
            slots, most = (len(members) + 1) * longest, max(widest, width)
            if slots <= SMALL_GROUP_TOKENS or used + cost >= (1 - MAX_PADDING) * slots * most:
                members.append(run)
                used, widest = used + cost, most
                continue
        groups.append(([run], whole[run]))
        used, widest = cost, width
    return [(torch.tensor(members), is_whole) for members, is_whole in groups]


class _ToSlots(torch.autograd.Function):
    """Rows -> queries of all groups; padding slots repeat a row, and so do the queries of shared tokens.

    Only one slot of each row has a gradient, so that the backward is a gather too: `index_select`'s own adds row by
    row, which costs more. It drops the gradient of the other slots, which is zero: what they return goes nowhere.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, query_slots: Tensor, row_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_to_slot)
        return rows.index_select(0, query_slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_to_slot,) = ctx.saved_tensors
        return grads[0].index_select(0, row_to_slot), None, None


class _ToRows(torch.autograd.Function):
    """Outputs of all groups -> rows; what is in padding slots is dropped and gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, row_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_to_slot)
        ctx.num_slots = slots.size(0)
        return slots.index_select(0, row_to_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (row_to_slot,) = ctx.saved_tensors
        slots = grads[0].new_zeros((ctx.num_slots, grads[0].size(1)))
        return slots.index_copy_(0, row_to_slot, grads[0]), None


class PackedAttention(torch.nn.Module):
    """softmax(q k^T * scale) v within each packed sequence, causal, grouped queries; subclasses compute it."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attention of packed tokens; collective over the context-parallel group, if they have one.

        Args:
            query: [n, 1, N, D].
            key: [n, 1, K, D].
            value: [n, 1, K, D].
            attention_mask: None; the sequences of `packed_seq_params` say what is seen.
            attn_mask_type: Unused, always causal.
            attention_bias: None.
            packed_seq_params: From `pack`.

        Returns:
            [n, 1, N * D].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is None:
            raise ValueError("attention takes packed sequences, and neither a mask nor a bias")
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """See `forward`."""
        raise NotImplementedError

    def scale_of(self, query: Tensor) -> float:
        """Of the scores of these queries."""
        return float(query.size(-1) ** -0.5 if self.scale is None else self.scale)


class CoreAttention(PackedAttention):
    """Of PyTorch's operators, on queries and keys that were turned before."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Groups of like sequences, one call for each."""
        if plan.keys is None:
            raise ValueError("attention takes sequences from `pack`")
        rows, heads, dim = query.size(0), query.size(2), query.size(3)
        scale = self.scale_of(query)
        queries = _ToSlots.apply(query.reshape(rows, -1), plan.query_slots, plan.row_to_slot)  # type: ignore[no-untyped-call]
        keys, values = (plan.keys.of(of_all_ranks(x, plan.group).flatten(1)) for x in (key, value))
        parts = [
            x.split_with_sizes([group.size * count for group, count in zip(plan.groups, counts, strict=True)])
            for x, counts in (
                (queries, [group.queries for group in plan.groups]),
                (keys, [group.keys for group in plan.groups]),
                (values, [group.keys for group in plan.groups]),
            )
        ]
        outputs = []
        for group, *of_group in zip(plan.groups, *parts, strict=True):
            q, k, v = (x.view(group.size, -1, x.size(1) // dim, dim).transpose(1, 2) for x in of_group)
            outputs.append(_attended(q, k, v, group, scale).transpose(1, 2).reshape(-1, heads * dim))
        stacked = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        attended: Tensor = _ToRows.apply(stacked, plan.row_to_slot)  # type: ignore[no-untyped-call]
        return attended.view(rows, 1, heads * dim)


def of_all_ranks(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Collective over the group: all ranks' keys or values, rank by rank; differentiable."""
    if group is None:
        return rows
    gathered: Tensor = gather_from_sequence_parallel_region(rows.contiguous(), group=group)
    return gathered


def _attended(query: Tensor, key: Tensor, value: Tensor, group: QueryGroup, scale: float) -> Tensor:
    """Attention of queries [B, N, Q, D] to keys and values [B, K, T, D]."""
    unseen = group.unseen
    if group.at_once:
        if unseen is None:
            unseen = query.new_full((1, group.keys, group.keys), -torch.inf).tril_(-1)
        return _at_once(query, key, value, unseen, scale)
    return attend(query, key, value, None if unseen is None else unseen[:, None], scale)


def _at_once(query: Tensor, key: Tensor, value: Tensor, unseen: Tensor, scale: float) -> Tensor:
    """The same with all scores in memory, to which `unseen` [B or 1, T, Q] is added.

    The scores of a key lie in a row: torch's softmax over few numbers in a row is slow.
    """
    size, _, length, dim = query.shape
    groups, keys = key.size(1), key.size(2)
    # the heads that share a KV head are columns of one product
    scores = key @ query.reshape(size, groups, -1, dim).transpose(2, 3)
    seen = torch.add(unseen[:, None, :, None], scores.view(size, groups, keys, -1, length), alpha=scale)
    probs = seen.softmax(2).view(size, groups, keys, -1)
    return (probs.transpose(2, 3) @ value).view(query.shape)
