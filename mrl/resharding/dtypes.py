"""Torch tensors of a layout: dtypes by name, allocation, filling, and the check that tensors and layout agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.resharding.layout import Layout, Region
from mrl.resharding.regions import slices

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
"""Name in layouts -> torch dtype."""


def expert_index_dtype(num_experts: int) -> torch.dtype:
    """Returns the smallest integer dtype that can represent every expert index and -1 (no expert)."""
    return torch.int8 if num_experts <= torch.iinfo(torch.int8).max + 1 else torch.int16


def allocate(layout: Layout, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns an uninitialised tensor for each name of a layout."""
    return {
        name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device=device) for name, stored in layout.items()
    }


def check_tensors(layout: Layout, tensors: Mapping[str, Tensor], *, dtypes: bool = True) -> None:
    """Compares tensors with the layout that describes them.

    Args:
        layout: Expected tensors.
        tensors: Actual tensors; additional names are allowed.
        dtypes: Also compare dtypes.

    Raises:
        RuntimeError: A tensor is missing, or has another shape or dtype; the message names it.
    """
    for name, stored in layout.items():
        if name not in tensors:
            raise RuntimeError(f"tensor '{name}' of the layout is missing in the model")
        tensor = tensors[name]
        if tuple(tensor.shape) != stored.shape or (dtypes and tensor.dtype != DTYPES[stored.dtype]):
            raise RuntimeError(
                f"'{name}' is {list(tensor.shape)} {tensor.dtype}; the layout expects {list(stored.shape)} "
                f"{stored.dtype}"
            )


def fill_tensors(layout: Layout, tensors: Mapping[str, Tensor], read: Callable[[str, Region], Tensor]) -> None:
    """Fills the tensors of a layout in place, with a cast to each tensor's dtype; padding becomes zero.

    Args:
        layout: Tensors to fill.
        tensors: Name -> tensor; additional names are allowed.
        read: Returns a region of the Hugging Face tensor with this name.

    Raises:
        RuntimeError: A tensor is missing or has another shape.
    """
    check_tensors(layout, tensors, dtypes=False)
    with torch.no_grad():
        for name, stored in layout.items():
            for region in stored.padding:
                tensors[name][slices(region)] = 0
            for piece in stored.pieces:
                tensors[name][slices(piece.dst)].copy_(read(piece.hf_name, piece.src))
