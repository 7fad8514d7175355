"""Causal attention over packed sequences with torch's scaled_dot_product_attention.

The core attention of the local layer spec (used without TransformerEngine), and the plan that lays out packed tokens
for it. Megatron's own core attention without TransformerEngine does not support packed sequences.

Shapes: n rows of a rank; B segments of a group, Q queries and T keys of its longest; N heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from mrl.data.shared_prefix import SharedPrefixes
from mrl.megatron.attention_segments import AttentionSegments, rank_segments
from mrl.megatron.deterministic_gather import RowGather, gather_plan
from mrl.megatron.linear_attention_plan import LinearAttentionPlan, plan_linear_attention
from mrl.megatron.router import Routing
from mrl.models.kernels.rope_tables import rotate
from mrl.models.kernels.sdpa import attend
from mrl.models.kernels.training import Angles, SharedPrefixMask

MAX_PADDING = 0.25
"""Largest fraction of a group's scores that may be padding."""
SMALL_GROUP_TOKENS = 4096
"""Number of keys, padding included, up to which one group costs less than the calls for two smaller ones."""

LONGEST_AT_ONCE = 32
"""Sequence length up to which computing all scores at once is faster on a CPU than torch's blockwise fused kernel."""


@dataclass(frozen=True)
class QueryGroup:
    """Segments that are attended together, padded to the longest.

    Attributes:
        size: Number of segments.
        queries: Queries of the longest segment.
        keys: Keys of the longest segment.
        unseen: Additive mask, 0 where a query sees a key, else -inf, [B or 1, Q, T]; None: the segments are complete
            sequences with a causal mask.
        at_once: True if all scores are computed at once; `unseen` is then [B or 1, T, Q].
    """

    size: int
    queries: int
    keys: int
    unseen: Tensor | None
    at_once: bool


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's description of packed sequences, extended by the plan for `CoreAttention`.

    Slots are the positions of queries and keys in the padded groups.

    Attributes:
        groups: Groups in the order of their slots.
        query_slots: Row of this rank in each query slot; padding repeats some row.
        row_to_slot: Query slot of each row of this rank, from which its output is taken.
        keys: Gather of the rows of all ranks into key slots.
        row_to_first: Key slot of the first key of each row's sequence.
        positions: Position of each row of this rank in its sequence.
        routing: Input of an MoE model's routers; None for a dense model.
        group: Ranks that share the microbatch; None: this rank has all of it.
        prefix_mask: Plan of compiled attention, instead of groups, slots and keys; None: it is not used.
        angles: Rotary angles of each row of this rank, for attention that rotates queries and keys; set by the model.
        local_angles: The same of layers with a sliding window; None: those of all layers.
        windowed: Plan of the layers with a sliding window; None if no layer has one, or attention needs no other plan.
        linear: Plan of the layers with linear attention; None if no layer has it.
    """

    groups: list[QueryGroup] = field(default_factory=list)
    query_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    row_to_slot: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    keys: RowGather | None = None
    row_to_first: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    routing: Routing | None = None
    group: dist.ProcessGroup | None = None
    prefix_mask: SharedPrefixMask | None = None
    angles: Angles | None = None
    local_angles: Angles | None = None
    windowed: PackedSequences | None = None
    linear: LinearAttentionPlan | None = None

    def tables_of(self, window: int | None) -> Angles:
        """Returns cosines and sines of a layer with this window for `rotate`, [n, 1, 1, rotated dimensions]."""
        cos, sin = self.angles_of(window)
        whole = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return whole[0][:, None, None], whole[1][:, None, None]

    def angles_of(self, window: int | None) -> Angles:
        """Returns the rotary angles of a layer with this sliding window."""
        found = self.angles if window is None or self.local_angles is None else self.local_angles
        if found is None:
            raise ValueError("attention takes sequences with their angles")
        return found


def pack(
    lens: Sequence[int],
    prefixes: SharedPrefixes,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    conv_kernel: int | None = None,
) -> PackedSequences:
    """Builds the plan for `CoreAttention`; the distinct tokens lie in the order of their numbers.

    Megatron gets one row of rotary angles per distinct token ("sbhd" with a batch of one).

    Args:
        lens: Tokens of each sequence, each at least 1, with the padding as a sequence.
        prefixes: Sharing of tokens: which are distinct. Their numbers need not follow the order of the sequences, even
            if no two sequences share a token.
        device: Device of the index tensors.
        group: Ranks that share the microbatch; the number of distinct tokens is a multiple of twice their number.
        dtype: Dtype of queries and keys.
        window: Sliding window of some layers, for which `PackedSequences.windowed` is built; None: none has one.
        conv_kernel: Tokens that the convolution of linear attention reads; None: no layer has linear attention.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    segments = rank_segments(size, rank, lens, prefixes)
    packed = PackedSequences(qkv_format="sbhd", max_seqlen_q=max(lens), max_seqlen_kv=max(lens), group=group)
    count = prefixes.origin_D.numel()
    _plan(packed, segments, count, count // size, device, dtype, extends=size == 1, window=None)
    if window is not None:
        packed.windowed = replace(packed, groups=[])
        _plan(packed.windowed, segments.cut(window), count, count // size, device, dtype, extends=False, window=window)
    if conv_kernel is not None:
        packed.linear = plan_linear_attention(lens, prefixes, conv_kernel, device)
    return packed


def _plan(
    packed: PackedSequences,
    segments: AttentionSegments,
    count: int,
    own: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    extends: bool,
    window: int | None,
) -> None:
    """Sets the groups, slots and keys of a plan.

    Args:
        packed: Plan.
        segments: Segments of this rank.
        count: Rows of all ranks.
        own: Rows of this rank.
        device: Device of the index tensors.
        dtype: Dtype of queries and keys.
        extends: See `_group_by_length`.
        window: Latest keys that a query attends to, its own included; None: all.
    """
    query_parts, key_parts = [], []
    row_to_slot, row_to_first, positions = torch.empty(3, own, dtype=torch.int64)
    offset = key_offset = 0
    for members, is_complete in _group_by_length(segments, extends=extends, longest=window):
        first, begin, end = (
            tokens[members][:, None] for tokens in (segments.first_N, segments.begin_N, segments.end_N)
        )
        start = first if is_complete else begin
        width, longest = int((end - start).max()), int((end - first).max())
        column, key_column = torch.arange(width)[None], torch.arange(longest)[None]
        rows_BQ = segments.row_P[torch.minimum(start + column, end - 1)] - segments.offset
        slots_BQ = offset + torch.arange(rows_BQ.numel()).view_as(rows_BQ)
        is_own = (start + column >= begin) & (start + column < end)
        row_to_slot[rows_BQ[is_own]] = slots_BQ[is_own]
        first_slot = (key_offset + torch.arange(len(members))[:, None] * longest).expand_as(is_own)
        row_to_first[rows_BQ[is_own]] = first_slot[is_own]
        positions[rows_BQ[is_own]] = (start + column - first)[is_own]
        at_once = longest <= LONGEST_AT_ONCE and device.type == "cpu" and dtype == torch.float32
        unseen = None
        if not is_complete:
            before = start - first
            before = before[:1] if bool((before == before[0]).all()) else before  # all segments share one mask
            sees = key_column[:, None] <= (before + column)[..., None]
            if window is not None:
                sees &= key_column[:, None] > (before + column)[..., None] - window
            sees = sees.transpose(1, 2) if at_once else sees
            unseen = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf).to(device)
        packed.groups.append(QueryGroup(len(members), width, longest, unseen, at_once))
        query_parts.append(rows_BQ.flatten())
        key_parts.append(segments.row_P[torch.minimum(first + key_column, end - 1)].flatten())
        offset += rows_BQ.numel()
        key_offset += len(members) * longest
    packed.query_slots = torch.cat(query_parts).to(device)
    packed.row_to_slot, packed.row_to_first = row_to_slot.to(device), row_to_first.to(device)
    packed.positions = positions.to(device)
    packed.keys = gather_plan(torch.cat(key_parts), count, device)


def pack_compiled(
    lens: Sequence[int], prefixes: SharedPrefixes, group: dist.ProcessGroup | None = None
) -> PackedSequences:
    """Builds the plan for compiled attention; arguments as for `pack`."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    seen, longest = shared_prefix_mask(rank_segments(size, rank, lens, prefixes)), max(lens)
    return PackedSequences(
        qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, group=group, prefix_mask=seen
    )


def shared_prefix_mask(segments: AttentionSegments) -> SharedPrefixMask:
    """Groups the segments by the first row of their sequence: sequences that share tokens start with the same row."""
    root_N = segments.row_P[segments.first_N]
    order = root_N.argsort(stable=True)
    counts_F = torch.unique_consecutive(root_N[order], return_counts=True)[1]
    first_R, begin_R, end_R = segments.first_N[order], segments.begin_N[order], segments.end_N[order]
    bound_F = torch.cat([counts_F.new_zeros(1), counts_F.cumsum(0)])
    return SharedPrefixMask(
        segments.row_P, first_R, begin_R, end_R, bound_F, segments.offset, int((end_R - first_R).max())
    )


def _group_by_length(
    segments: AttentionSegments, *, extends: bool, longest: int | None = None
) -> list[tuple[Tensor, bool]]:
    """Groups segments of similar length, longest first; returns each group and whether it has complete sequences.

    A group is small or has little padding. A causal kernel computes half of the scores, one with a mask all of them, so
    with `extends` a long segment of more than half of its sequence is computed with the queries before it. A segment of
    more than `longest` keys has a mask in any case.
    """
    queries_N, keys_N = segments.end_N - segments.begin_N, segments.end_N - segments.first_N
    complete_N = queries_N == keys_N
    if extends:
        complete_N |= (keys_N > LONGEST_AT_ONCE) & (2 * queries_N > keys_N)
    if longest is not None:
        complete_N &= keys_N <= longest
    groups: list[tuple[list[int], bool]] = []
    used_scores, widest_query = 0, 0
    queries, keys, complete = queries_N.tolist(), keys_N.tolist(), complete_N.tolist()
    for run in sorted(range(len(keys)), key=lambda index: (complete[index], -keys[index], -queries[index], index)):
        width = keys[run] if complete[run] else queries[run]
        cost = keys[run] * width
        if groups and groups[-1][1] == complete[run]:
            members, longest = groups[-1][0], keys[groups[-1][0][0]]
            slots, most = (len(members) + 1) * longest, max(widest_query, width)
            if slots <= SMALL_GROUP_TOKENS or used_scores + cost >= (1 - MAX_PADDING) * slots * most:
                members.append(run)
                used_scores, widest_query = used_scores + cost, most
                continue
        groups.append(([run], complete[run]))
        used_scores, widest_query = cost, width
    return [(torch.tensor(members), is_complete) for members, is_complete in groups]


class _ToSlots(torch.autograd.Function):
    """Rows -> queries of all groups; padding slots repeat a row, and so do the queries of shared tokens.

    Only one slot of each row has a gradient, so that the backward is a gather too: `index_select`'s own adds row by
    row, which costs more. It drops the gradients of the other slots, which are zero since their outputs are not used.
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
    """Outputs of all groups -> rows; padding slots are dropped and get gradient zero."""

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


def sliding_window(config: Any) -> int | None:
    """Returns the sliding window of a Megatron config, tokens with the query's own; None: no layer has one."""
    # Megatron counts the keys before the query's own
    return None if config.window_size is None else int(config.window_size[0]) + 1


class PackedAttention(torch.nn.Module):
    """Base class of softmax(q k^T * scale) v within each packed sequence, causal, with grouped queries.

    Attributes:
        scale: Factor of the scores; None: head dim ** -0.5.
        window: Number of latest tokens that a query attends to, its own included; None: all.
        softmax_offset: Attention sinks of this rank's heads, [N], under Megatron's name; None: the model has none.
    """

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
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = sliding_window(config) if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the sinks for a distributed checkpoint, split over the tensor-parallel ranks."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return sharded

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
        """Computes attention of packed tokens; collective over the context-parallel group, if there is one.

        Args:
            query: Queries [n, 1, N, D].
            key: Keys [n, 1, K, D].
            value: Values [n, 1, K, Dv]; Dv is D but in latent attention.
            attention_mask: Unsupported, must be None; `packed_seq_params` determines the mask.
            attn_mask_type: Ignored, always causal.
            attention_bias: Unsupported, must be None.
            packed_seq_params: Plan from `pack`.

        Returns:
            [n, 1, N * Dv].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is None:
            raise ValueError("attention takes packed sequences, and neither a mask nor a bias")
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Computes attention for `forward`."""
        raise NotImplementedError

    def scale_of(self, query: Tensor) -> float:
        """Returns the scale of the scores."""
        return float(query.size(-1) ** -0.5 if self.scale is None else self.scale)


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's self-attention with an output gate, also where several ranks share a key/value head."""

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        """Returns queries, keys, values and gates of this rank's heads; Megatron returns the gates of a whole group."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **options)
        heads = query.size(2)
        if gate.size(2) != heads:
            first = self.pg_collection.tp.rank() % (gate.size(2) // heads) * heads
            gate = gate[:, :, first : first + heads]
        return query, key, value, gate


class CoreAttention(PackedAttention):
    """Attention with PyTorch's operators, on queries and keys that are already rotated."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Computes attention with one call for each group of similar segments."""
        if self.window is not None and plan.windowed is not None:
            plan = plan.windowed
        if plan.keys is None:
            raise ValueError("attention takes sequences from `pack`")
        rows, heads, dims = query.size(0), query.size(2), (query.size(3), key.size(3), value.size(3))
        scale = self.scale_of(query)
        queries = _ToSlots.apply(query.reshape(rows, -1), plan.query_slots, plan.row_to_slot)  # type: ignore[no-untyped-call]
        keys, values = (plan.keys.gather(gather_cp(x, plan.group).flatten(1)) for x in (key, value))
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
            q, k, v = (
                x.view(group.size, -1, x.size(1) // dim, dim).transpose(1, 2)
                for x, dim in zip(of_group, dims, strict=True)
            )
            attended = _attend_group(q, k, v, group, scale, self.softmax_offset)
            outputs.append(attended.transpose(1, 2).reshape(-1, heads * dims[2]))
        stacked = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        of_rows: Tensor = _ToRows.apply(stacked, plan.row_to_slot)  # type: ignore[no-untyped-call]
        return of_rows.view(rows, 1, heads * dims[2])


class RotatingAttention(CoreAttention):
    """Attention with PyTorch's operators, which also rotates queries and keys: layers differ in their angles."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackedSequences) -> Tensor:
        """Computes attention, see `PackedAttention.forward`; queries and keys are not rotated yet."""
        cos, sin = plan.tables_of(self.window)
        return super().attend(rotate(query, cos, sin), rotate(key, cos, sin), value, plan)


def gather_cp(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Collective over the group: gathers all ranks' keys or values, in rank order; differentiable."""
    if group is None:
        return rows
    gathered: Tensor = gather_from_sequence_parallel_region(rows.contiguous(), group=group)
    return gathered


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: QueryGroup, scale: float, sinks: Tensor | None
) -> Tensor:
    """Computes attention of queries [B, N, Q, D] to keys [B, K, T, D] and values [B, K, T, Dv]; sinks [N] or None."""
    unseen = group.unseen
    if group.at_once:
        if unseen is None:
            unseen = query.new_full((1, group.keys, group.keys), -torch.inf).tril_(-1)
        return _attend_at_once(query, key, value, unseen, scale, sinks)
    return attend(query, key, value, None if unseen is None else unseen[:, None], scale, sinks)


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, unseen: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Computes attention with all scores in memory; `unseen` [B or 1, T, Q] is added to them."""
    size, _, length, dim = query.shape
    groups, keys = key.size(1), key.size(2)
    # the heads that share a KV head are columns of one product
    scores = key @ query.reshape(size, groups, -1, dim).transpose(2, 3)
    seen = torch.add(unseen[:, None, :, None], scores.view(size, groups, keys, -1, length), alpha=scale)
    probs = seen.softmax(2).view(size, groups, keys, -1)
    attended = (probs.transpose(2, 3) @ value).view(*query.shape[:3], -1)
    if sinks is None:
        return attended
    mass = seen.logsumexp(2).view(size, -1, length, 1)
    return attended * (mass - sinks.view(-1, 1, 1)).sigmoid()
