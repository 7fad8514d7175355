"""Mean, extremes and variance of values that are spread over ranks, from sums that add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Spread(NamedTuple):
    """Statistics of a column of values, with the unbiased variance; all 0 without values."""

    mean: float
    max: float
    min: float
    variance: float


def spread_sums(columns: Sequence[Tensor], mask_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one rank's part of the sums for `spread_metrics`.

    Args:
        columns: Columns of n values per token, [R] each.
        mask_R: True where the token counts.

    Returns:
        Sums [1 + 2 n] fp64, to be added over ranks, and extremes [2 n] fp64, to be reduced by max.
    """
    kept = torch.stack([values_R[mask_R].double() for values_R in columns])
    sums = torch.cat([torch.tensor([kept.size(1)]).double(), kept.sum(1), kept.square().sum(1)])
    lowest = torch.full((2 * len(columns), 1), -torch.inf, dtype=torch.float64)
    return sums, torch.cat([torch.cat([kept, -kept]), lowest], 1).amax(1)


def spread_metrics(sums: Tensor, largest: Tensor) -> list[Spread]:
    """Returns the statistics of each column, from the added sums and the reduced extremes."""
    num = sums.numel() // 2
    count = float(sums[0])
    if not count:
        return [Spread(0.0, 0.0, 0.0, 0.0)] * num
    totals, squares = sums[1 : 1 + num].tolist(), sums[1 + num :].tolist()
    extremes = largest.tolist()
    return [
        Spread(
            total / count,
            extremes[column],
            -extremes[num + column],
            max(0.0, square - total * total / count) / max(1.0, count - 1),
        )
        for column, (total, square) in enumerate(zip(totals, squares, strict=True))
    ]
