"""TransformerEngine's attention for sequences that share tokens: queries of distinct tokens, keys of full sequences.

Everything except attention is computed once per distinct token, as with the local layers (`attention.py`). Attention
sees segments of rows that are consecutive in a sequence (a prompt with the first response, each further response) as
packed ("thd") sequences with more keys than queries: the keys are those of all tokens of the sequence up to the
segment's last, copied for it. The causal mask is aligned to the last query and the last key ("bottom right").

With context parallelism the segments are those of this rank's rows, and keys and values of all ranks are gathered
before they are copied; TransformerEngine's own ring is used if no tokens are shared.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.data.shared_prefix import SharedPrefixes
from mrl.megatron.attention import PackedSequences
from mrl.megatron.attention_segments import rank_segments
from mrl.megatron.deterministic_gather import RowGather, gather_plan
from mrl.models.transformer_engine import LENGTH_UNIT
from mrl.types import ranges


class _Mask(enum.Enum):
    """A mask type that Megatron's enum lacks."""

    padding_causal_bottom_right = enum.auto()


@dataclass
class SharedSequences(PackedSequences):
    """Sequences that share tokens, for TransformerEngine.

    Attributes:
        segments: Lengths of each segment's queries and keys.
        keys: Gather of all ranks' keys and values into the segments' keys.
        group: Ranks that share the microbatch; None: this rank has all of it.
    """

    segments: PackedSeqParams | None = None
    keys: RowGather | None = None
    group: dist.ProcessGroup | None = None


def pack_for_te(lens: Sequence[int], device: torch.device) -> PackedSequences:
    """Describes consecutive sequences that share no tokens.

    Args:
        lens: Tokens of each sequence, each at least 1.
        device: Device of the index tensors.
    """
    ends = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lens), max_seqlen_kv=max(lens)
    )


def pack_shared_for_te(
    lens: Sequence[int], prefixes: SharedPrefixes, device: torch.device, group: dist.ProcessGroup | None = None
) -> SharedSequences:
    """Describes sequences that share tokens; the distinct tokens lie in the order of their numbers.

    Megatron gets one row of rotary angles per distinct token ("sbhd" with a batch of one).

    Args:
        lens: Tokens of each sequence, each at least 1, with the padding as a sequence.
        prefixes: Sharing of tokens: which are distinct; from `shared_prefixes`, which numbers a sequence's own tokens
            consecutively.
        device: Device of the index tensors.
        group: Ranks that share the microbatch; the number of distinct tokens is a multiple of twice their number.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    found = rank_segments(size, rank, lens, prefixes).sorted_by_row()
    ends, most = [], []
    for counts_N in (found.end_N - found.begin_N, found.end_N - found.first_N):
        ends.append(torch.cat([counts_N.new_zeros(1), counts_N.cumsum(0)]).to(device, torch.int32))
        most.append(-(-int(counts_N.max()) // LENGTH_UNIT) * LENGTH_UNIT)
    segments = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], max_seqlen_q=most[0], max_seqlen_kv=most[1]
    )
    keys = gather_plan(found.row_P[ranges(found.first_N, found.end_N)], prefixes.origin_D.numel(), device)
    longest = max(lens)
    return SharedSequences(
        qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, segments=segments, keys=keys, group=group
    )


def with_shared_tokens(kind: type) -> type:
    """Returns a subclass of Megatron's `TEDotProductAttention` that also supports `SharedSequences`."""

    class TESharedAttention(kind):  # type: ignore[misc]
        cp_group: Any

        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "attention_type": "cross"})  # queries and keys have different lengths

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            attention_bias: Tensor | None = None,
            packed_seq_params: PackedSequences | None = None,
            **others: Any,
        ) -> Tensor:
            """Computes attention like Megatron's; with `SharedSequences` from [n, 1, heads, D] to [n, 1, heads * D]."""
            plan = packed_seq_params
            if not isinstance(plan, SharedSequences) or plan.keys is None:
                unshared: Tensor = super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, **others
                )
                return unshared
            copied = [_copied(rows, plan.keys, plan.group) for rows in (key, value)]
            ring, self.cp_group = self.cp_group, None  # all keys are already gathered
            try:
                attended: Tensor = super().forward(
                    query.squeeze(1),
                    *copied,
                    attention_mask,
                    _Mask.padding_causal_bottom_right,
                    attention_bias,
                    plan.segments,
                    **others,
                )
            finally:
                self.cp_group = ring
            return attended.reshape(query.size(0), 1, -1)

    return TESharedAttention


def _copied(rows: Tensor, keys: RowGather, group: dist.ProcessGroup | None) -> Tensor:
    """Collective over the group: gathers keys or values [n, 1, K, D] and copies them for each segment [S, K, D]."""
    if group is not None:
        rows = gather_from_sequence_parallel_region(rows.contiguous(), group=group)
    return keys.gather(rows.flatten(1)).view(-1, *rows.shape[2:])
