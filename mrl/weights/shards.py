"""How one row of a family's table is cut over tensor-parallel ranks.

Owns the rules that Megatron and the native engine share: a rule says which rows (or columns) of which Hugging Face
tensors a rank stores, in order; `shard_row` turns them into a `StoredTensor`. Only the order of fused query, key and
value rows differs between the two, so it is an argument. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.errors import UserError
from mrl.models.base import ArchSpec, Kind, ParamSpec, dims
from mrl.models.hf_config import family_of
from mrl.weights.layout import Piece, Region, StoredTensor

Segment = tuple[int, int, int]
"""(index into `ParamSpec.hf`, first row, row after the last): a run of rows along the split dimension."""


@dataclass(frozen=True)
class TensorShard:
    """One rank's place in a tensor-parallel group; `key` is the config key that error messages name."""

    size: int
    rank: int
    key: str


def table(arch: ArchSpec) -> list[ParamSpec]:
    """The rows of the family's table that exist for `arch`."""
    return [spec for spec in family_of(arch).params if spec.when(arch)]


def hf_shapes(spec: ParamSpec, arch: ArchSpec) -> list[tuple[int, ...]]:
    """Shape of each Hugging Face tensor of a row."""
    words = dims(arch)
    return [tuple(words[word] for word in shape.split()) for shape in spec.shapes]


def padded_rows(num_rows: int, num_shards: int) -> int:
    """`num_rows` rounded up to a multiple of `num_shards`."""
    return -(-num_rows // num_shards) * num_shards


def check_divides(arch: ArchSpec, shard: TensorShard) -> None:
    """Raises UserError where `shard.size` ranks cannot share a layer of `arch`."""
    tp = shard.size
    for what, size in (("attention heads", arch.num_heads), ("intermediate_size", arch.intermediate_size)):
        if size % tp:
            raise UserError(f"{shard.key}={tp} does not divide the model's {what} ({size}). Choose a divisor.")
    kv = arch.num_kv_heads
    if kv % tp and tp % kv:
        raise UserError(f"{shard.key}={tp} and the model's {kv} key/value heads: one must be a multiple of the other.")


def shard_row(
    spec: ParamSpec,
    arch: ArchSpec,
    shard: TensorShard,
    *,
    layer: int | None,
    dtype: str,
    qkv_rows: Callable[[ArchSpec, TensorShard], list[Segment]],
) -> StoredTensor:
    """What one rank stores of one row of the table.

    Args:
        spec: The row.
        arch: The model.
        shard: The rank's place.
        layer: Layer index in the whole model; None outside the layers.
        dtype: Stored dtype.
        qkv_rows: The order of fused query, key and value rows on this rank.
    """
    shapes = hf_shapes(spec, arch)
    names = [name if layer is None else name.format(layer=layer) for name in spec.hf]
    padding = 0
    dim = 1 if spec.kind is Kind.ROW else 0
    size = shapes[0][dim]
    if spec.kind is Kind.REPLICATED:
        segments = [(0, 0, size)]
    elif spec.kind is Kind.VOCAB:
        each = padded_rows(size, shard.size) // shard.size
        start = min(size, shard.rank * each)
        stop = min(size, start + each)
        segments = [(0, start, stop)]
        padding = each - (stop - start)
    elif spec.kind is Kind.QKV:
        segments = qkv_rows(arch, shard)
    else:  # COLUMN, ROW and GATE_UP: an equal part of each tensor, one after the other
        each = size // shard.size
        segments = [(index, shard.rank * each, (shard.rank + 1) * each) for index in range(len(names))]
    return stack(names, shapes, segments, dim=dim, dtype=dtype, padding=padding)


def stack(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    segments: Sequence[Segment],
    *,
    dim: int,
    dtype: str,
    padding: int = 0,
) -> StoredTensor:
    """Segments one after the other along `dim`, then `padding` empty rows."""
    rest = [(0, extent) for extent in shapes[0]]

    def region(start: int, stop: int) -> Region:
        return tuple((start, stop) if axis == dim else whole for axis, whole in enumerate(rest))

    pieces, end = [], 0
    for index, start, stop in segments:
        if stop > start:
            pieces.append(Piece(names[index], region(start, stop), region(end, end + stop - start)))
            end += stop - start
    shape = tuple(end + padding if axis == dim else extent for axis, extent in enumerate(shapes[0]))
    return StoredTensor(shape, dtype, tuple(pieces), (region(end, end + padding),) if padding else ())
