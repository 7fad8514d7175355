"""Packing of sequences into one microbatch, in pure functions that run on the CPU.

`lay_out` decides which rows are computed, `scored_tokens` which row predicts each response token, and `shard_for_cp`
which rows are this context-parallel rank's.

All tokens of a sequence except the last are inputs of the model: the last is scored but predicts nothing.

Shapes: as in `mrl/types.py`, and I packed inputs: the sequences' tokens without the last of each; D computed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.data.shared_prefix import SharedPrefixes, each_token
from mrl.megatron.attention import PackedSequences
from mrl.megatron.context_parallel import ContextTargets, own_rows, own_rows_by_sequence
from mrl.megatron.model import Targets
from mrl.types import RolloutBatch


@dataclass(frozen=True)
class PackedMicrobatch:
    """The sequences of one forward pass, packed.

    Attributes:
        rows: Indices of the sequences in the batch; may be empty.
        batch: The selected sequences, on the device.
        tokens: Input tokens and padding [1, rows], or this rank's part of them; shared prefixes occur once.
        positions: Position of each of these tokens in its sequence, [1, rows].
        packed: Packing of the sequences for attention.
        targets: Tokens to score.
        row_I: Row in which each packed input is computed, among the concatenated rows of all context-parallel ranks; on
            the CPU.
    """

    rows: list[int]
    batch: RolloutBatch
    tokens: Tensor
    positions: Tensor
    packed: PackedSequences
    targets: Targets
    row_I: Tensor


@dataclass(frozen=True)
class RowLayout:
    """The rows computed for a microbatch, before context parallelism splits them over ranks.

    Attributes:
        count: Number of rows, D.
        lens: Packed inputs of each sequence, padding included.
        prefixes: Sharing of inputs: which of them are computed.
        row_I: Row in which each packed input is computed.
        positions: Position of each row in its sequence.
        by_sequence: True if context parallelism splits each sequence separately.
    """

    count: int
    lens: list[int]
    prefixes: SharedPrefixes
    row_I: Tensor
    positions: Tensor
    by_sequence: bool = False


@dataclass(frozen=True)
class CpShard:
    """The part of a `RowLayout` that one context-parallel rank computes, n rows.

    Attributes:
        rows: Its rows, int64 [n].
        row_I: Row of each packed input, among the concatenated rows of all ranks.
        owner_R: Rank that computes the row of each scored token.
        is_own_R: True where this rank does.
        local_D: Index of its rows in `rows`; undefined for the rows of other ranks.
    """

    rows: Tensor
    row_I: Tensor
    owner_R: Tensor
    is_own_R: Tensor
    local_D: Tensor


def input_mask(batch: RolloutBatch) -> Tensor:
    """Returns True at the tokens that are inputs: all of a sequence but the last, bool [P]."""
    is_input_P = torch.ones_like(batch.tokens_P, dtype=torch.bool)
    is_input_P[batch.seq_lens_B.cumsum(0) - 1] = False
    return is_input_P


def lay_out(lens: list[int], prefixes: SharedPrefixes, *, unit: int, at_least: int = 0) -> RowLayout:
    """Lays out the distinct inputs, then padding up to a multiple of `unit`, which is a sequence of its own.

    Args:
        lens: Inputs of each sequence.
        prefixes: Sharing of inputs: which of them are computed.
        unit: Divisor of the number of rows.
        at_least: Minimum number of rows, a multiple of `unit`.
    """
    distinct_P, origin_D = prefixes
    padding = max(-origin_D.numel() % unit, at_least - origin_D.numel(), 0 if lens else unit)
    count, end = origin_D.numel() + padding, sum(lens)
    all_lens = [*lens, padding] if padding else lens
    positions = _positions(all_lens)
    padded = SharedPrefixes(
        torch.cat([distinct_P, torch.arange(count - padding, count)]),
        torch.cat([origin_D, torch.arange(end, end + padding)]),
    )
    return RowLayout(count, all_lens, padded, distinct_P, positions[padded.origin_D])


def lay_out_by_sequence(lens: list[int], *, unit: int, total_unit: int = 1) -> RowLayout:
    """Lays out all inputs, with each sequence padded to a multiple of `unit`, as TransformerEngine splits them.

    Args:
        lens: Inputs of each sequence.
        unit: Divisor of the rows of each sequence.
        total_unit: Divisor of the number of rows, itself a multiple of `unit`; padding is a sequence of its own.
    """
    padded = [-(-length // unit) * unit for length in lens] or [unit]
    if padding := -sum(padded) % total_unit:
        padded.append(padding)
    starts = torch.tensor([0, *padded]).cumsum(0)
    row_I = starts[: len(lens)].repeat_interleave(torch.tensor(lens, dtype=torch.int64)) + _positions(lens)
    return RowLayout(sum(padded), padded, each_token(sum(padded)), row_I, _positions(padded), by_sequence=True)


def scored_tokens(batch: RolloutBatch, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Returns the row that predicts each response token, and the token's id, [R] each.

    Response token i of a sequence is predicted by the input before it; the last inputs predict the response.
    """
    first = (batch.seq_lens_B - 1).cumsum(0) - batch.response_lens_B
    before = batch.response_lens_B.cumsum(0) - batch.response_lens_B
    input_R = (first - before).repeat_interleave(batch.response_lens_B) + torch.arange(batch.response_mask_R.numel())
    # token index: each earlier sequence has one token more than inputs, and the predicted token is the next one
    return layout.row_I[input_R], batch.tokens_P[input_R + batch.sequence_R + 1]


def shard_for_cp(layout: RowLayout, rows_R: Tensor, size: int, rank: int) -> CpShard:
    """Returns the part of a layout that a context-parallel rank computes.

    Args:
        layout: Rows of all ranks.
        rows_R: Row that predicts each scored token.
        size: Number of context-parallel ranks.
        rank: Index of the rank among them.
    """
    rows_of_ranks = torch.stack(
        [
            own_rows_by_sequence(layout.lens, size, other)
            if layout.by_sequence
            else own_rows(layout.count, size, other)
            for other in range(size)
        ]
    )
    owner_D, place_D, local_D = torch.empty(3, layout.count, dtype=torch.int64)
    owner_D[rows_of_ranks] = torch.arange(size)[:, None]
    place_D[rows_of_ranks.flatten()] = torch.arange(layout.count)
    rows, owner_R = rows_of_ranks[rank], owner_D[rows_R]
    local_D[rows] = torch.arange(rows.numel())
    return CpShard(rows, place_D[layout.row_I], owner_R, owner_R == rank, local_D)


def shard_targets(targets: Targets, shard: CpShard, context: ContextTargets) -> Targets:
    """Selects the targets whose rows a context-parallel rank computes.

    Args:
        targets: Targets of all ranks.
        shard: Part of the rank.
        context: Gathers the scores of all ranks.
    """
    own_R = shard.is_own_R
    return replace(
        targets,
        rows_R=shard.local_D[targets.rows_R[own_R]],
        tokens_R=targets.tokens_R[own_R],
        support=None if targets.support is None else targets.support.where(own_R),
        context=context,
        distillation=None if targets.distillation is None else targets.distillation.at(own_R),
    )


def _positions(lens: list[int]) -> Tensor:
    """Returns the position of each packed token in its sequence."""
    lens_B = torch.tensor(lens, dtype=torch.int64)
    return torch.arange(sum(lens)) - (lens_B.cumsum(0) - lens_B).repeat_interleave(lens_B)
