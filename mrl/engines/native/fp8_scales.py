"""Scales of a weight stored in FP8, and dequantization with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.resharding.fp8_quantize import dequantize


@dataclass(frozen=True)
class Scales:
    """Scales of a matrix [M, N], or of some of its rows.

    Attributes:
        table_RC: Stored scales, fp32; weight sync updates them in place.
        rows_M: Row index into `table_RC` for each row of the matrix, int32.
        columns_N: Column index into `table_RC` for each column of the matrix, int32.
    """

    table_RC: Tensor
    rows_M: Tensor
    columns_N: Tensor

    def of_rows(self, num_parts: int) -> list[Scales]:
        """Splits the scales for equal row blocks of the matrix."""
        return [Scales(self.table_RC, rows, self.columns_N) for rows in self.rows_M.chunk(num_parts)]

    def weight(self, stored_MN: Tensor, out_MN: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the dequantized weight in `dtype`, written to `out_MN` if given."""
        if out_MN is None:
            out_MN = torch.empty(stored_MN.shape, dtype=dtype, device=stored_MN.device)
        return dequantize(stored_MN, self.table_RC, self.rows_M, self.columns_N, out_MN)
