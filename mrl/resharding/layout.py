"""Data types of resharding: how stored tensors map onto full Hugging Face tensors, the common coordinates.

`hf.py`, `megatron.py`, `native.py`, `vllm.py` and `trtllm.py` fill them; `plan.py` intersects them. Pure data: no
tensor, no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

Region = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


@dataclass(frozen=True)
class Piece:
    """A region of a stored tensor and the equal region of a Hugging Face tensor: `stored[dst] == hf_tensor[src]`.

    Both regions have the same extent in every dimension.

    Attributes:
        hf_name: Name of the Hugging Face tensor.
        src: Region in the Hugging Face tensor.
        dst: Region in the stored tensor.
    """

    hf_name: str
    src: Region
    dst: Region


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a rank stores it.

    Attributes:
        shape: Stored shape.
        dtype: Name of the stored dtype, a key of `resharding/dtypes.py: DTYPES`.
        pieces: Regions that equal regions of Hugging Face tensors; with `padding` they cover the tensor exactly once.
        padding: Regions without weights (padded vocabulary rows).
        view: Shape in a file, where it has more dimensions (experts, layers); the same elements in the same order.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    padding: tuple[Region, ...] = ()
    view: tuple[int, ...] | None = None


Layout = dict[str, StoredTensor]
"""All tensors of one rank: name -> tensor."""
