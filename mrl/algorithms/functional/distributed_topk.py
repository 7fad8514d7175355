"""Which tokens of the whole minibatch are the largest, or drawn: exact, whatever rank and microbatch they are in.

Owns order statistics over the data-parallel ranks. Only counts travel: eight sums of 256 for an order statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 1e-9
"""Of a place in the order: 0.3 x 10 is the third."""

_BYTES = range(7, -1, -1)


def kth_largest(values_R: Tensor, mask_R: Tensor, k: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: the k-th largest of all ranks' values, fp64 scalar.

    Args:
        values_R: Of this rank, finite.
        mask_R: True where a value counts.
        k: From 1 to the number of values that count, the same on every rank.
        reduce: Elementwise sum over the data-parallel ranks; called eight times.
    """
    keys = _ordered(values_R.double()[mask_R])
    found, left = 0, k
    for byte in _BYTES:  # the byte of the k-th largest, given those above it
        counts = reduce(torch.bincount(keys >> 8 * byte & 255, minlength=256).double())
        above = counts.flip(0).cumsum(0)
        place = int((above < left).sum())  # bytes 255, 254, ... that leave it further down
        left -= int(above[place - 1]) if place else 0
        chosen = 255 - place
        found = found << 8 | chosen
        keys = keys[keys >> 8 * byte & 255 == chosen]
    return _value(found)


def largest(values_R: Tensor, mask_R: Tensor, k: int, uniforms_R: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Collective over data-parallel: True at the k largest of all ranks' values, bool [R]; all where there are fewer.

    Args:
        values_R: Of this rank, finite.
        mask_R: True where a value may be chosen.
        k: How many, the same on every rank.
        uniforms_R: A number of each token's own; of equal values those with the largest are taken.
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
    """Collective over data-parallel: True at values not below the (1 - part) quantile of all ranks', bool [R].

    Args:
        values_R: Of this rank, finite.
        mask_R: True where a value counts.
        part: Of the values that count, in (0, 1]; values equal to the quantile are in it too.
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
    """Bits of fp64 numbers, int64, so that bytes compare as the numbers do; -0 is 0."""
    bits = (values + 0.0).view(torch.int64)
    return torch.where(bits < 0, ~bits, bits ^ torch.iinfo(torch.int64).min)


def _value(ordered: int) -> Tensor:
    """The number of such bits."""
    bits = ordered ^ 1 << 63 if ordered >> 63 else ordered ^ (1 << 64) - 1
    return torch.tensor(bits - (1 << 64) if bits >> 63 else bits, dtype=torch.int64).view(torch.float64)
