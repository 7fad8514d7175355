"""The scales of a weight that is stored in FP8, and the weight that the two stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.resharding.fp8_quantize import dequantize


@dataclass(frozen=True)
class Scales:
    """Of a matrix [M, N], or of some of its rows.

    Attributes:
        table_RC: Stored scales, fp32; updates in place are seen.
        rows_M: Row of the table for each row, int32.
        columns_N: Column of the table for each column, int32.
    """

    table_RC: Tensor
    rows_M: Tensor
    columns_N: Tensor

    def of_rows(self, num_parts: int) -> list[Scales]:
        """The scales of equal parts, one below the other."""
        return [Scales(self.table_RC, rows, self.columns_N) for rows in self.rows_M.chunk(num_parts)]

    def weight(self, stored_MN: Tensor, out_MN: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What the stored values stand for, in `dtype`; in `out_MN`, where it is given."""
        if out_MN is None:
            out_MN = torch.empty(stored_MN.shape, dtype=dtype, device=stored_MN.device)
        return dequantize(stored_MN, self.table_RC, self.rows_M, self.columns_N, out_MN)
