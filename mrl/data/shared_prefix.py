"""Search for token prefixes that several sequences share; a causal model computes the same values for them.

`mrl/megatron/forward_backward.py` uses it to compute a shared prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.types import ranges


class SharedPrefixes(NamedTuple):
    """Deduplication of packed tokens: two tokens are equal if they and all tokens before them in their sequences are.

    Attributes:
        distinct_P: Index of the distinct token of each packed token, int64.
        origin_D: Index of the packed token that represents each distinct token, int64.
    """

    distinct_P: Tensor
    origin_D: Tensor


def each_token(count: int) -> SharedPrefixes:
    """Returns the identity deduplication, in which every token is distinct."""
    return SharedPrefixes(torch.arange(count), torch.arange(count))


def shared_prefixes(tokens_P: Tensor, lens: Sequence[int]) -> SharedPrefixes:
    """Finds the longest prefix that each sequence shares with any other sequence.

    Args:
        tokens_P: Token ids of the sequences, concatenated, on the CPU.
        lens: Length of each sequence, tokens.
    """
    lens_B = torch.tensor(lens, dtype=torch.int64)
    ends_B = lens_B.cumsum(0)
    size, raw = tokens_P.element_size(), tokens_P.numpy().tobytes()
    keys = [raw[size * (end - length) : size * end] for end, length in zip(ends_B.tolist(), lens, strict=True)]
    # After sorting, each sequence shares its longest prefix with its predecessor.
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)
    starts_B, lens_B = (ends_B - lens_B)[order], lens_B[order]
    shared_B = _shared_with_predecessor(tokens_P, starts_B, lens_B)
    origin_D = ranges(starts_B + shared_B, starts_B + lens_B)
    distinct_P = torch.empty(tokens_P.numel(), dtype=torch.int64)
    distinct_P[origin_D] = torch.arange(origin_D.numel())
    distinct, starts = distinct_P.numpy(), starts_B.tolist()
    for start, before, shared in zip(starts[1:], starts, shared_B[1:].tolist(), strict=False):
        distinct[start : start + shared] = distinct[before : before + shared]
    return SharedPrefixes(distinct_P, origin_D)


def _shared_with_predecessor(tokens_P: Tensor, starts_B: Tensor, lens_B: Tensor) -> Tensor:
    """Returns the number of leading tokens that each sequence shares with its predecessor."""
    most_B = torch.minimum(lens_B, torch.cat([lens_B[:1] * 0, lens_B[:-1]]))
    before_B = torch.cat([starts_B[:1], starts_B[:-1]])
    differs = tokens_P[ranges(starts_B, starts_B + most_B)] != tokens_P[ranges(before_B, before_B + most_B)]
    row = torch.arange(lens_B.numel()).repeat_interleave(most_B)
    position = ranges(torch.zeros_like(most_B), most_B)
    return most_B.scatter_reduce(0, row[differs], position[differs], "amin")
