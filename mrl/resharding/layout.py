"""Regions, pieces, layouts: how stored tensors map onto full Hugging Face tensors, the common coordinates.

Owns the data types of resharding. The rules that fill them are in `hf.py`, `megatron.py`, `native.py`; `plan.py`
intersects them. Pure data: no tensor, no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

Region = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


@dataclass(frozen=True)
class Piece:
    """`stored[dst] == hf_tensor[src]`; both regions have the same extent in every dimension."""

    hf_name: str
    src: Region
    dst: Region


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a rank stores it.

    Attributes:
        shape: Stored shape.
        dtype: A name of `resharding/dtypes.py: DTYPES`.
        pieces: What it holds of the Hugging Face tensors; together with `padding` they cover it exactly once.
        padding: Regions that hold nothing (padded vocabulary rows).
        view: Shape in a file, where it has more dimensions (experts, layers); the same elements in the same order.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    padding: tuple[Region, ...] = ()
    view: tuple[int, ...] | None = None


Layout = dict[str, StoredTensor]
"""What one rank holds: name -> tensor."""
