"""Causal attention over packed sequences with torch's scaled_dot_product_attention.

Owns the core attention of the local layer spec (used where TransformerEngine is not installed) and the plan by which
packed tokens are laid out for it. Megatron's own core attention without TransformerEngine takes no packed sequences.

Shapes: P packed tokens, B sequences, N heads, K KV heads, D head dim, T longest sequence of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.data.prefixes import Prefixes
from mrl.megatron.context import ContextShard
from mrl.megatron.router import Routing

MAX_PADDING = 0.25
"""Longest part of a bucket that may be padding."""
SMALL_BUCKET_TOKENS = 4096
"""A bucket up to this size, padding included, costs less than the calls of two smaller ones."""

LONGEST_AT_ONCE = 32
"""Up to this length all scores at once cost less on a CPU than torch's fused kernel, which works block by block."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest: [size, longest] slots."""

    size: int
    longest: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's description of packed sequences, and how to lay them out in buckets.

    Attributes:
        buckets: In the order of their slots.
        slot_to_token: For each slot of all buckets the packed token in it; a padding slot repeats some token.
        token_to_slot: For each packed token a slot that holds it.
        token_to_first: For each packed token the first slot of the sequence in which this slot is.
        shared: Whether sequences share tokens: several slots besides padding may hold the same one.
        routing: What the routers of a mixture of experts must know; None for a dense model.
        context: This rank's part of the tokens; None: it has all of them.
    """

    buckets: list[Bucket] = field(default_factory=list)
    slot_to_token: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    token_to_slot: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    token_to_first: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shared: bool = False
    routing: Routing | None = None
    context: ContextShard | None = None


def pack_for_te(lens: Sequence[int], device: torch.device) -> PackedSequences:
    """Sequences that lie one after the other, for TransformerEngine's attention.

    Args:
        lens: Tokens of each sequence, each at least 1.
        device: Where the index tensors go.
    """
    cu_seqlens = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lens),
        max_seqlen_kv=max(lens),
    )


def pack(lens: Sequence[int], prefixes: Prefixes, device: torch.device) -> PackedSequences:
    """Sequences of which the distinct tokens lie in the order of their numbers, for `CoreAttention`.

    Megatron takes the rotary angles one row for each of these ("sbhd" with a batch of one).

    Args:
        lens: Tokens of each sequence, each at least 1.
        prefixes: Which of them are distinct. Their numbers need not follow the order of the sequences, also where no
            two sequences share a token.
        device: Where the index tensors go.
    """
    starts = [0, *accumulate(lens)]
    packed = PackedSequences(qkv_format="sbhd", max_seqlen_q=max(lens), max_seqlen_kv=max(lens))
    token_parts, (slot_of, first_of) = [], torch.empty(2, starts[-1], dtype=torch.int64)
    offset = 0
    for members in _similar(lens):
        width = lens[members[0]]
        sizes = torch.tensor([lens[item] for item in members])[:, None]
        first = torch.tensor([starts[item] for item in members])[:, None]
        column = torch.arange(width)[None]
        tokens = first + torch.minimum(column, sizes - 1)
        filled = column < sizes
        slots = offset + torch.arange(len(members) * width).view(-1, width)
        slot_of[tokens[filled]] = slots[filled]
        first_of[tokens[filled]] = slots[:, :1].expand_as(slots)[filled]
        token_parts.append(tokens.reshape(-1))
        packed.buckets.append(Bucket(len(members), width))
        offset += len(members) * width
    packed.shared = prefixes.origin_D.numel() < starts[-1]
    packed.slot_to_token = prefixes.distinct_P[torch.cat(token_parts)].to(device)
    packed.token_to_slot = slot_of[prefixes.origin_D].to(device)
    packed.token_to_first = first_of[prefixes.origin_D].to(device)
    return packed


def _similar(lens: Sequence[int]) -> list[list[int]]:
    """Sequences in buckets, longest first; a bucket is small or has little padding."""
    buckets: list[list[int]] = []
    filled = 0
    for item in sorted(range(len(lens)), key=lambda index: (-lens[index], index)):
        if buckets:
            bucket = buckets[-1]
            slots = (len(bucket) + 1) * lens[bucket[0]]
            if slots <= SMALL_BUCKET_TOKENS or filled + lens[item] >= (1 - MAX_PADDING) * slots:
                bucket.append(item)
                filled += lens[item]
                continue
        buckets.append([item])
        filled = lens[item]
    return buckets


class _ToSlots(torch.autograd.Function):
    """Packed rows -> rows of all buckets; padding slots repeat a row, and so do shared tokens.

    Where only one slot of each token has a gradient, the backward is a gather too: `index_select`'s own adds row by
    row, which costs more. It drops the gradient of the other slots, which is zero: only padding queries see padding
    keys, and what they and the repeated queries return goes nowhere.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slot_to_token: Tensor, token_to_slot: Tensor, add: bool) -> Tensor:
        ctx.save_for_backward(slot_to_token, token_to_slot)
        ctx.add = add
        return rows.index_select(0, slot_to_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        slot_to_token, token_to_slot = ctx.saved_tensors
        if not ctx.add:
            return grads[0].index_select(0, token_to_slot), None, None, None
        total = grads[0].new_zeros((token_to_slot.numel(), grads[0].size(1)), dtype=torch.float32)
        total.index_add_(0, slot_to_token, grads[0].float())
        return total.to(grads[0].dtype), None, None, None


class _ToTokens(torch.autograd.Function):
    """Rows of all buckets -> packed rows; what is in padding slots is dropped and gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, token_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_to_slot)
        ctx.num_slots = slots.size(0)
        return slots.index_select(0, token_to_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_to_slot,) = ctx.saved_tensors
        slots = grads[0].new_zeros((ctx.num_slots, grads[0].size(1)))
        return slots.index_copy_(0, token_to_slot, grads[0]), None


class CoreAttention(torch.nn.Module):
    """softmax(q k^T * scale) v within each packed sequence, causal, grouped queries."""

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
        """Attention of packed tokens.

        Args:
            query: [P, 1, N, D].
            key: [P, 1, K, D].
            value: [P, 1, K, D].
            attention_mask: None; the sequences of `packed_seq_params` say what is seen.
            attn_mask_type: Unused, always causal.
            attention_bias: None.
            packed_seq_params: From `pack`.

        Returns:
            [P, 1, N * D].
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is None:
            raise ValueError("CoreAttention takes packed sequences, and neither a mask nor a bias")
        plan = packed_seq_params
        if plan.context is not None:
            return self._over_ranks(query, key, value, plan.context)
        tokens, heads, dim = query.size(0), query.size(2), query.size(3)
        slots = [
            _ToSlots.apply(x.reshape(tokens, -1), plan.slot_to_token, plan.token_to_slot, add)  # type: ignore[no-untyped-call]
            for x, add in ((query, False), (key, plan.shared), (value, plan.shared))
        ]
        outputs, offset = [], 0
        for bucket in plan.buckets:
            count = bucket.size * bucket.longest
            q, k, v = (
                x[offset : offset + count].view(bucket.size, bucket.longest, -1, dim).transpose(1, 2) for x in slots
            )
            if bucket.longest <= LONGEST_AT_ONCE and q.device.type == "cpu" and q.dtype == torch.float32:
                attended = _at_once(q, k, v, dim**-0.5 if self.scale is None else self.scale)
            else:
                attended = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
                )
            outputs.append(attended.transpose(1, 2).reshape(count, heads * dim))
            offset += count
        stacked = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        attended_P: Tensor = _ToTokens.apply(stacked, plan.token_to_slot)  # type: ignore[no-untyped-call]
        return attended_P.view(tokens, 1, heads * dim)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, context: ContextShard) -> Tensor:
        """Collective over context-parallel: this rank's queries, all ranks' keys and values."""
        tokens, heads, dim = query.size(0), query.size(2), query.size(3)
        all_keys, all_values = context.gather(key).flatten(0, 1), context.gather(value).flatten(0, 1)
        own = query.flatten(0, 1)
        outputs = []
        for found in context.groups:
            q, k, v = (
                rows[index].transpose(1, 2)
                for rows, index in (
                    (own, found.queries_BQ),
                    (all_keys, found.keys_BT),
                    (all_values, found.keys_BT),
                )
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=found.sees_BQT[:, None], scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(outputs)[context.row_of_query].view(tokens, 1, heads * dim)


def _at_once(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of queries [B, N, T, D] to keys and values [B, K, T, D], with all scores in memory."""
    size, heads, length, dim = query.shape
    groups = key.size(1)
    unseen = query.new_full((length, length), -torch.inf).triu_(1)
    # the heads that share a KV head are rows of one product
    scores = query.reshape(size, groups, -1, dim) @ key.transpose(2, 3)
    probs = torch.add(unseen, scores.view(size, heads, length, length), alpha=scale).softmax(-1)
    return (probs.view(size, groups, -1, length) @ value).view(query.shape)
