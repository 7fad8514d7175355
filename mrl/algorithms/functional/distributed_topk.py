"""Exact top-k and quantiles over the tokens of all data-parallel ranks.

Only counts are communicated: a sum of 256 numbers for each of the 8 bytes of an fp64 value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 1e-9
"""Tolerance of a rank in the order: 0.3 x 10 is the third."""

_BYTES = range(7, -1, -1)


def kth_largest(values_R: Tensor, mask_R: Tensor, k: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: returns the k-th largest of all ranks' values, fp64 scalar.

    Args:
        values_R: Values of this rank, finite.
        mask_R: True where a value counts.
        k: Rank in descending order, from 1 to the number of values that count; the same on every rank.
        reduce: Elementwise sum over the data-parallel ranks; called eight times.
    """
    keys = _ordered(values_R.double()[mask_R])
    found, left = 0, k
    for byte in _BYTES:  # finds one byte of the k-th largest, given the bytes above it
        counts = reduce(torch.bincount(keys >> 8 * byte & 255, minlength=256).double())
        above = counts.flip(0).cumsum(0)
        place = int((above < left).sum())  # how many byte values 255, 254, ... are above the searched one
        left -= int(above[place - 1]) if place else 0
        chosen = 255 - place
        found = found << 8 | chosen
        keys = keys[keys >> 8 * byte & 255 == chosen]
    return _value(found)


def top_k_mask(
    values_R: Tensor, mask_R: Tensor, k: int, uniforms_R: Tensor, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Collective over data-parallel: returns True at the k largest of all ranks' values (all if fewer), bool [R].

    Args:
        values_R: Values of this rank, finite.
        mask_R: True where a value may be selected.
        k: Number of values to select, the same on every rank.
        uniforms_R: One random number per token, which breaks ties: the largest are selected.
        reduce: Elementwise sum over the data-parallel ranks.
    """
    total = int(reduce(mask_R.sum().double().reshape(1))[0])
    if total <= k:
        return mask_R.clone()
    if k < 1:
        return torch.zeros_like(mask_R)
    values_R = values_R.double()
    threshold = kth_largest(values_R, mask_R, k, reduce)
    above_R, equal_R = mask_R & (values_R > threshold), mask_R & (values_R == threshold)
    left = k - int(reduce(above_R.sum().double().reshape(1))[0])
    drawn = kth_largest(uniforms_R, equal_R, left, reduce)
    return above_R | equal_R & (uniforms_R >= drawn)


def highest(values_R: Tensor, mask_R: Tensor, part: float, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: returns True at values at or above the (1 - part) quantile, bool [R].

    Args:
        values_R: Values of this rank, finite.
        mask_R: True where a value counts.
        part: Fraction of all ranks' values to select, in (0, 1]; values equal to the quantile are included.
        reduce: Elementwise sum over the data-parallel ranks.

    Source: high-entropy tokens, arXiv 2506.01939; TRL's `get_high_entropy_mask`, which interpolates the quantile
    linearly: no value lies between that and the next larger one.
    """
    num = int(reduce(mask_R.sum().double().reshape(1))[0])
    if num == 0:
        return mask_R.clone()
    below = math.ceil((1 - part) * (num - 1) - ROUNDING)
    return mask_R & (values_R.double() >= kth_largest(values_R, mask_R, num - below, reduce))


def _ordered(values: Tensor) -> Tensor:
    """Maps fp64 numbers to int64 so that their bytes, from the highest, compare like the numbers; -0 becomes 0."""
    bits = (values + 0.0).view(torch.int64)
    return torch.where(bits < 0, ~bits, bits ^ torch.iinfo(torch.int64).min)


def _value(ordered: int) -> Tensor:
    """Inverts `_ordered`."""
    bits = ordered ^ 1 << 63 if ordered >> 63 else ordered ^ (1 << 64) - 1
    return torch.tensor(bits - (1 << 64) if bits >> 63 else bits, dtype=torch.int64).view(torch.float64)
