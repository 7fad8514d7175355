"""Tokens that several sequences have in common: with the same tokens before them they are the same to a causal model.

Owns the search. What is computed once because of it is in `mrl/megatron/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


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
    ids, lens_B = tokens_P.numpy(), np.asarray(lens, np.int64)
    ends_B = lens_B.cumsum()
    size, raw = ids.itemsize, ids.tobytes()
    keys = [raw[size * (end - length) : size * end] for end, length in zip(ends_B.tolist(), lens, strict=True)]
    # sorted, the sequence with the longest prefix in common is the one before
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    starts_B, lens_B = (ends_B - lens_B)[order], lens_B[order]
    shared_B = _shared_with_the_one_before(ids, starts_B, lens_B)
    place_P = _counted(lens_B)
    own_D = (np.repeat(starts_B, lens_B) + place_P)[place_P >= np.repeat(shared_B, lens_B)]
    distinct = np.empty(len(ids), np.int64)
    distinct[own_D] = np.arange(len(own_D))
    starts = starts_B.tolist()
    for start, before, shared in zip(starts[1:], starts, shared_B[1:].tolist(), strict=False):
        distinct[start : start + shared] = distinct[before : before + shared]
    return Prefixes(torch.from_numpy(distinct), torch.from_numpy(own_D))


def _shared_with_the_one_before(ids: Ints, starts_B: Ints, lens_B: Ints) -> Ints:
    """First tokens that each sequence has in common with the one before it in this order."""
    shared_B: Ints = np.minimum(lens_B, np.concatenate([lens_B[:1] * 0, lens_B[:-1]]))
    place = _counted(shared_B)
    before_B = np.concatenate([starts_B[:1], starts_B[:-1]])
    differs = ids[np.repeat(starts_B, shared_B) + place] != ids[np.repeat(before_B, shared_B) + place]
    found = np.flatnonzero(differs)[::-1]  # of several numbers for a sequence the last one written stays: the first
    shared_B[np.repeat(np.arange(len(shared_B)), shared_B)[found]] = place[found]
    return shared_B


def _counted(lens_B: Ints) -> Ints:
    """Place of each token in its sequence."""
    place: Ints = np.arange(lens_B.sum()) - np.repeat(lens_B.cumsum() - lens_B, lens_B)
    return place
