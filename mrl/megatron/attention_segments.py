"""Segments of rows that attention computes: which tokens of a sequence are computed with it, and what they attend to.

A token that several sequences share is computed with one of them, and with context parallelism on one rank. What
remains of a sequence on a rank are segments of consecutive tokens; their keys are all tokens of the sequence up to the
segment's last.

Shapes: P packed tokens of the sequences, N segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.data.shared_prefix import SharedPrefixes
from mrl.megatron.context_parallel import own_rows


@dataclass(frozen=True)
class AttentionSegments:
    """The segments of one rank.

    Attributes:
        row_P: Row of each packed token's key, among the rows of all ranks gathered in rank order.
        first_N: First packed token of the segment's sequence.
        begin_N: First packed token of the segment.
        end_N: One after the segment's last packed token.
        offset: Index of this rank's first row among those of all ranks.
    """

    row_P: Tensor
    first_N: Tensor
    begin_N: Tensor
    end_N: Tensor
    offset: int

    def cut(self, window: int) -> AttentionSegments:
        """Cuts the segments into parts of at most `window` tokens, whose keys begin with the first that a token sees.

        A token sees the last `window` tokens up to itself.
        """
        parts_N = (self.end_N - self.begin_N + window - 1) // window
        segment_M = torch.arange(parts_N.numel()).repeat_interleave(parts_N)
        part_M = torch.arange(segment_M.numel()) - (parts_N.cumsum(0) - parts_N)[segment_M]
        begin_M = self.begin_N[segment_M] + part_M * window
        end_M = torch.minimum(begin_M + window, self.end_N[segment_M])
        first_M = torch.maximum(self.first_N[segment_M], begin_M - window + 1)
        return AttentionSegments(self.row_P, first_M, begin_M, end_M, self.offset)

    def sorted_by_row(self) -> AttentionSegments:
        """Sorts the segments so that their queries, concatenated, are this rank's rows in order."""
        order = self.row_P[self.begin_N].argsort()
        return AttentionSegments(self.row_P, self.first_N[order], self.begin_N[order], self.end_N[order], self.offset)


def rank_segments(size: int, rank: int, lens: Sequence[int], prefixes: SharedPrefixes) -> AttentionSegments:
    """Returns the segments of rank `rank` of `size`; each of its rows is in exactly one.

    Args:
        size: Number of ranks that share the microbatch.
        rank: Index of the rank in the context-parallel group.
        lens: Packed tokens of each sequence, with the padding as a sequence.
        prefixes: Sharing of tokens: which are computed. With several ranks, the number of distinct tokens is a multiple
            of 2 x `size`.
    """
    count = prefixes.origin_D.numel()
    row_D = torch.empty(count, dtype=torch.int64)
    row_D[torch.cat([own_rows(count, size, other) for other in range(size)])] = torch.arange(count)
    row_P = row_D[prefixes.distinct_P]
    offset = rank * (count // size)
    total = prefixes.distinct_P.numel()
    own = prefixes.origin_D[prefixes.distinct_P] == torch.arange(total)
    own &= (row_P >= offset) & (row_P < offset + count // size)
    ends_B = torch.tensor(lens, dtype=torch.int64).cumsum(0)
    first_P = torch.cat([ends_B.new_zeros(1), ends_B[:-1]]).repeat_interleave(torch.tensor(lens, dtype=torch.int64))
    begins, stops = own.clone(), own.clone()
    same_sequence = first_P[1:] == first_P[:-1]
    begins[1:] &= ~(own[:-1] & same_sequence)
    stops[:-1] &= ~(own[1:] & same_sequence)
    begin_N = begins.nonzero().squeeze(1)
    return AttentionSegments(row_P, first_P[begin_N], begin_N, stops.nonzero().squeeze(1) + 1, offset)
