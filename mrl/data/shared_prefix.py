"""Tokens that several sequences have in common: with the same tokens before them they are the same to a causal model.

Owns the search. What is computed once because of it is in `mrl/megatron/forward_backward.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.types import ranges


class Prefixes(NamedTuple):
    """Distinct tokens of packed sequences, where a token is distinct by itself and all before it in its sequence.

    Attributes:
        distinct_P: For each packed token its distinct one, int64.
        origin_D: For each distinct token a packed one that it stands for, int64.
    """

    distinct_P: Tensor
    origin_D: Tensor


def each_token(count: int) -> Prefixes:
    """Every token is distinct."""
    return Prefixes(torch.arange(count), torch.arange(count))


def shared_prefixes(tokens_P: Tensor, lens: Sequence[int]) -> Prefixes:
    """Finds the longest prefix that each sequence shares with any other.

    Args:
        tokens_P: The sequences' ids, one sequence after the other, on the CPU.
        lens: Tokens of each sequence.
    """
    lens_B = torch.tensor(lens, dtype=torch.int64)
    ends_B = lens_B.cumsum(0)
    size, raw = tokens_P.element_size(), tokens_P.numpy().tobytes()
    keys = [raw[size * (end - length) : size * end] for end, length in zip(ends_B.tolist(), lens, strict=True)]
    # sorted, the sequence with the longest prefix in common is the one before
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)
    starts_B, lens_B = (ends_B - lens_B)[order], lens_B[order]
    shared_B = _shared_with_the_one_before(tokens_P, starts_B, lens_B)
    origin_D = ranges(starts_B + shared_B, starts_B + lens_B)
    distinct_P = torch.empty(tokens_P.numel(), dtype=torch.int64)
    distinct_P[origin_D] = torch.arange(origin_D.numel())
    distinct, starts = distinct_P.numpy(), starts_B.tolist()
    for start, before, shared in zip(starts[1:], starts, shared_B[1:].tolist(), strict=False):
        distinct[start : start + shared] = distinct[before : before + shared]
    return Prefixes(distinct_P, origin_D)


def _shared_with_the_one_before(tokens_P: Tensor, starts_B: Tensor, lens_B: Tensor) -> Tensor:
    """First tokens that each sequence has in common with the one before it in this order."""
    most_B = torch.minimum(lens_B, torch.cat([lens_B[:1] * 0, lens_B[:-1]]))
    before_B = torch.cat([starts_B[:1], starts_B[:-1]])
    differs = tokens_P[ranges(starts_B, starts_B + most_B)] != tokens_P[ranges(before_B, before_B + most_B)]
    row = torch.arange(lens_B.numel()).repeat_interleave(most_B)
    place = ranges(torch.zeros_like(most_B), most_B)
    return most_B.scatter_reduce(0, row[differs], place[differs], "amin")
