"""MXFP4 experts of a Hugging Face folder: names, checks, and dequantization of a region.

`NAME_blocks` has two 4-bit numbers per byte, the lower half first, and `NAME_scales` one power of two for each block of
32: [experts, rows, blocks, 16] and [experts, rows, blocks]. Together they are the transpose of the tensor `NAME` that
transformers has in memory, [experts, columns, rows]. Only the blocks of a region are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.errors import UserError
from mrl.models._quantization import Mxfp4Format
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.hf_names import StoredLocation
from mrl.resharding.layout import Region

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BYTES = 32, 16
_BIAS, _NAN = 127, 255
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Mxfp4Tensors:
    """Tensors of a folder that are stored in MXFP4.

    Args:
        form: Form of the quantization.
        names: Names of all stored tensors.

    Attributes:
        dtype: Dtype of the dequantized weights.
        blocks: Name of each dequantized tensor -> name of its blocks.
        others: Names of stored tensors that are not in MXFP4.
    """

    def __init__(self, form: Mxfp4Format, names: Mapping[str, object]) -> None:
        self.dtype = form.dtype
        pairs = {name.removesuffix(_BLOCKS): name for name in names if name.endswith(_BLOCKS)}
        self.blocks = {name: blocks for name, blocks in pairs.items() if f"{name}{_SCALES}" in names}
        taken = {*self.blocks.values(), *(f"{name}{_SCALES}" for name in self.blocks)}
        self.others = [name for name in names if name not in taken]

    def parts_of(self, name: str) -> tuple[str, str]:
        """Returns the names of a tensor's blocks and scales."""
        return self.blocks[name], f"{name}{_SCALES}"

    def shape(self, name: str, stored: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> tuple[int, ...]:
        """Returns the shape of a dequantized tensor.

        Args:
            name: Name of the dequantized tensor.
            stored: Shape of each stored tensor.
            dtypes: Dtype of each stored tensor.

        Raises:
            UserError: Blocks or scales have another shape or dtype than MXFP4 has.
        """
        blocks, scales = self.parts_of(name)
        for each in (blocks, scales):
            if dtypes[each] != "uint8":
                raise UserError(f"'{each}' is stored as {dtypes[each]}; expected uint8 for MXFP4.")
        shape = stored[blocks]
        if len(shape) != 4 or shape[3] != _BYTES:
            raise UserError(
                f"'{blocks}' has shape {list(shape)}; expected [experts, rows, blocks, {_BYTES}] for MXFP4."
            )
        if stored[scales] != shape[:3]:
            raise UserError(f"'{scales}' has shape {list(stored[scales])}; expected {list(shape[:3])} for MXFP4.")
        return shape[0], shape[2] * _BLOCK, shape[1]

    def read(self, located: StoredLocation, tensor: Callable[[str], Tensor], region: Region) -> Tensor:
        """Returns a region of a matrix of the table, dequantized.

        Args:
            located: Location of the matrix in the dequantized tensor.
            tensor: Returns a stored tensor as a view of its file.
            region: Rows and columns of the matrix.

        Raises:
            UserError: A scale of the region is not a number.
        """
        expert, _, part = located.index
        (first_row, last_row), (first, last) = region
        begin = first // _BLOCK
        place = (expert, part, slice(begin, -(-last // _BLOCK)))
        packed, name = self.parts_of(located.stored)
        blocks = tensor(packed)[place][first_row:last_row]
        scales = tensor(name)[place][first_row:last_row].int()
        if bool((scales == _NAN).any()):
            raise UserError(f"'{name}' has a scale that is not a number (255). Download the checkpoint again.")
        values = _VALUES[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
        rows = torch.ldexp(values, scales[..., None] - _BIAS).flatten(1)
        return rows[:, first - begin * _BLOCK : last - begin * _BLOCK].to(DTYPES[self.dtype])
