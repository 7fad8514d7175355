"""Gather of rows that are needed several times, with a deterministic gradient.

The gradient of a row is summed over its copies in a fixed order and in fp32, so that equal runs have equal gradients on
a GPU too, where torch's own gradient of a gather adds by atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowGather:
    """Indices of a gather of rows D into copies S.

    Attributes:
        row_S: Row of each copy, int64.
        order_S: Copies sorted by row.
        starts_D: Start of each row's copies in `order_S`.
    """

    row_S: Tensor
    order_S: Tensor
    starts_D: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers copies [S, n] of rows [D, n]; differentiable."""
        copied: Tensor = _Copied.apply(rows, self)  # type: ignore[no-untyped-call]
        return copied


def gather_plan(row_S: Tensor, num_rows: int, device: torch.device) -> RowGather:
    """Builds the indices; a row without a copy gets gradient zero.

    Args:
        row_S: Row of each copy, on the CPU.
        num_rows: Number of rows, D.
        device: Device of the index tensors.
    """
    counts_D = torch.bincount(row_S, minlength=num_rows)
    order_S = row_S.argsort(stable=True)
    return RowGather(row_S.to(device), order_S.to(device), (counts_D.cumsum(0) - counts_D).to(device))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, which: RowGather) -> Tensor:
        ctx.which = which
        return rows.index_select(0, which.row_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # sums of rows by index; in bf16 it adds in fp32
        return F.embedding_bag(ctx.which.order_S, grads[0].contiguous(), ctx.which.starts_D, mode="sum"), None
