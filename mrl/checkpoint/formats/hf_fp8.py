"""FP8 weights of a Hugging Face folder: names of their scales, checks, and dequantization of a region.

A stored value times the scale of its block is the weight; only the blocks of a region are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.errors import UserError, shown
from mrl.models._quantization import Fp8Format
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE, BlockGrid, block_indices
from mrl.resharding.fp8_quantize import dequantize
from mrl.resharding.layout import Region
from mrl.resharding.regions import slices

_SCALE_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ".input_scale"
"""End of the name of an activation's scale, which dequantized weights do not need."""


class Fp8Scales:
    """Scales of the FP8 matrices of a folder.

    Args:
        form: Form of the quantization.
        names: Names of all stored tensors.

    Attributes:
        dtype: Dtype of the dequantized weights.
        others: Names of stored tensors that are neither scales of a matrix in `names` nor of activations.
    """

    def __init__(self, form: Fp8Format, names: Mapping[str, object]) -> None:
        self.dtype, self._form = form.dtype, form
        self._scale_of = {
            matrix: name
            for name in names
            if name.endswith(f".weight{form.suffix}") and (matrix := name.removesuffix(form.suffix)) in names
        }
        taken = set(self._scale_of.values())
        self.others = [name for name in names if name not in taken and not name.endswith(_ACTIVATIONS)]

    def check(self, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that every FP8 matrix has scales, and that scales belong to one; reads no values.

        Args:
            dtypes: Dtype of each stored tensor.
            shapes: Shape of each stored tensor.

        Raises:
            UserError: The message names the tensor.
        """
        for name in self.others:
            if dtypes[name] == DTYPE and name not in self._scale_of:
                raise UserError(
                    f"'{name}' is stored in FP8 and has no scales; expected '{name}{self._form.suffix}'. Download the "
                    "checkpoint again."
                )
        for name, scale in self._scale_of.items():
            if dtypes[name] != DTYPE:
                raise UserError(f"'{scale}' has scales for '{name}', which is stored as {dtypes[name]}, not {DTYPE}.")
            if dtypes[scale] not in _SCALE_DTYPES:
                raise UserError(f"'{scale}' is stored as {dtypes[scale]}; expected one of {', '.join(_SCALE_DTYPES)}.")
            self._grid(name, shapes[name], shapes[scale])

    def read(self, name: str, tensor: Callable[[str], Tensor], region: Region) -> Tensor:
        """Returns a region of a matrix, dequantized.

        Args:
            name: Stored name of the matrix.
            tensor: Returns a stored tensor as a view of its file.
            region: Rows and columns.

        Raises:
            UserError: A scale of the region is not a finite number above 0.
        """
        stored, scale = tensor(name), self._scale_of[name]
        table = tensor(scale)
        grid = self._grid(name, tuple(stored.shape), tuple(table.shape))
        blocks = grid.intersecting_blocks(region)
        scales = table.reshape(grid.counts)[slices(blocks)].float()
        wrong = ~(torch.isfinite(scales) & (scales > 0))
        if bool(wrong.any()):
            value, place = float(scales[wrong][0]), wrong.nonzero()[0].tolist()
            index = [first + offset for (first, _), offset in zip(blocks, place, strict=True)]
            raise UserError(
                f"'{scale}' has the scale {value} at {index}; expected a finite number above 0. Download the "
                "checkpoint again."
            )
        part = stored[slices(region)]
        out = torch.empty(part.shape, dtype=DTYPES[self.dtype])
        return dequantize(part, scales, *block_indices(grid, region), out)

    def _grid(self, name: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> BlockGrid:
        """Returns the blocks of a matrix, from the config and the shape of its scales."""
        if len(shape) != 2:
            raise UserError(f"'{name}' is stored in FP8 with shape {list(shape)}; mrl reads FP8 matrices only.")
        rows, columns = shape
        grids: dict[tuple[int, ...], BlockGrid] = {}
        if self._form.block is not None:
            grid = BlockGrid((rows, columns), self._form.block)
            grids[grid.counts] = grid
        else:
            whole, by_row = BlockGrid((rows, columns), (rows, columns)), BlockGrid((rows, columns), (1, columns))
            grids |= {(rows, 1): by_row, (rows,): by_row, (1,): whole, (): whole, (1, 1): whole}
        if scales not in grids:
            raise UserError(
                f"'{self._scale_of[name]}' has shape {list(scales)}; expected {shown([*map(list, grids)])} for a "
                f"matrix of {rows} x {columns}."
            )
        return grids[scales]
