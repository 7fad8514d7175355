"""Runs of rows that attention computes: which tokens of a sequence are computed with it, and what they see.

A token that several sequences share is computed with one of them, and with context parallelism on one rank. What is
left of a sequence on a rank are runs of tokens that follow one another; their keys are all tokens of the sequence up to
the run's last.

Shapes: P packed tokens of the sequences, N runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.data.shared_prefix import Prefixes
from mrl.megatron.context_parallel import own_rows


@dataclass(frozen=True)
class Runs:
    """Of one rank.

    Attributes:
        row_P: Where the keys of each packed token lie among those of all ranks, gathered rank by rank.
        first_N: Packed token with which the run's sequence begins.
        begin_N: The run's first packed token.
        end_N: One after its last.
        offset: Row of the first of this rank's tokens among those of all ranks.
    """

    row_P: Tensor
    first_N: Tensor
    begin_N: Tensor
    end_N: Tensor
    offset: int

    def in_order_of_rows(self) -> Runs:
        """The same; the queries of one after the other are this rank's rows in their order."""
        order = self.row_P[self.begin_N].argsort()
        return Runs(self.row_P, self.first_N[order], self.begin_N[order], self.end_N[order], self.offset)


def own_runs(size: int, rank: int, lens: Sequence[int], prefixes: Prefixes) -> Runs:
    """The runs of a rank of `size`; each of its rows is in one of them.

    Args:
        size: Ranks that share the microbatch.
        rank: Which of them.
        lens: Packed tokens of each sequence, filling included as a sequence.
        prefixes: Which of them are computed; as many distinct ones as a multiple of twice `size`, unless that is 1.
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
    return Runs(row_P, first_P[begin_N], begin_N, stops.nonzero().squeeze(1) + 1, offset)
