"""Tokens that several sequences have in common: with the same tokens before them they are the same to a causal model.

Owns the search. What is computed once because of it is in `mrl/megatron/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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
    ids = tokens_P.numpy()
    ends = np.cumsum(lens, dtype=np.int64)
    parts = np.split(ids, ends[:-1]) if len(lens) else []
    distinct, origin = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    before, before_distinct = ids[:0], distinct[:0]
    count = 0
    # sorted, the sequence with the longest prefix in common is the one before
    for index in sorted(range(len(parts)), key=lambda index: parts[index].tobytes()):
        part = parts[index]
        length = min(len(part), len(before))
        differs = part[:length] != before[:length]
        shared = int(differs.argmax()) if differs.any() else length
        start = int(ends[index]) - len(part)
        own = len(part) - shared
        row = distinct[start : start + len(part)]
        row[:shared] = before_distinct[:shared]
        row[shared:] = np.arange(count, count + own)
        origin[count : count + own] = np.arange(start + shared, start + len(part))
        count += own
        before, before_distinct = part, row
    return Prefixes(torch.from_numpy(distinct), torch.from_numpy(origin[:count].copy()))
