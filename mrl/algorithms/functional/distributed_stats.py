"""Mean, extremes and variance of values that are spread over ranks, as sums that add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Spread(NamedTuple):
    """Of a column of values; the variance is unbiased. All 0 where there are none."""

    mean: float
    max: float
    min: float
    variance: float


def spread_sums(columns: Sequence[Tensor], mask_R: Tensor) -> tuple[Tensor, Tensor]:
    """What `spread_metrics` needs of one rank's part.

    Args:
        columns: Values of each token.
        mask_R: True where the token counts.

    Returns:
        Sums [1 + 2 n] fp64, to be added, and extremes [2 n] fp64, to be reduced by max.
    """
    kept = torch.stack([values_R[mask_R].double() for values_R in columns])
    sums = torch.cat([torch.tensor([kept.size(1)]).double(), kept.sum(1), kept.square().sum(1)])
    lowest = torch.full((2 * len(columns), 1), -torch.inf, dtype=torch.float64)
    return sums, torch.cat([torch.cat([kept, -kept]), lowest], 1).amax(1)


def spread_metrics(sums: Tensor, largest: Tensor) -> list[Spread]:
    """From the added sums and the extremes, one for each column."""
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
