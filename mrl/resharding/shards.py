"""Sharding rules shared by the layouts: rows of a family's table split over tensor- and expert-parallel ranks.

A rule lists the rows (or columns) of Hugging Face tensors that a rank stores, in order; `shard_row` and `shard_expert`
turn it into a `StoredTensor`. Only the order of fused query, key and value rows differs between Megatron and the
engines, so it is an argument. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from mrl.errors import UserError
from mrl.models.base import (
    ArchSpec,
    LayerKind,
    MoeSpec,
    ParamSpec,
    PipelineStage,
    ShardKind,
    dims,
    layer_kinds,
    linear_attention_of,
    moe_of,
)
from mrl.models.hf_config import family_of
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor

Segment = tuple[int, int, int]
"""(index of the part, first row, row after the last) along the split dimension."""


@dataclass(frozen=True)
class TensorShard:
    """One rank's position in a tensor-parallel group; error messages name the config key `key`."""

    size: int
    rank: int
    key: str


@dataclass(frozen=True)
class ExpertShard:
    """One rank's experts: `ep` selects the experts that it has, `etp` its part of each."""

    ep: TensorShard
    etp: TensorShard

    def experts(self, moe: MoeSpec) -> range:
        """Returns the indices in the layer of the rank's experts."""
        each = moe.num_experts // self.ep.size
        return range(self.ep.rank * each, (self.ep.rank + 1) * each)


def param_specs(arch: ArchSpec) -> list[ParamSpec]:
    """Returns the rows of the family's table that exist for `arch`."""
    return [spec for spec in family_of(arch).params if spec.when(arch) and layers_of(spec, arch)]


def layers_of(spec: ParamSpec, arch: ArchSpec) -> Sequence[int | None]:
    """Returns the indices of the layers that have a row of the table; (None,) for a row outside the layers."""
    return _layers(spec.layers, arch) if spec.place is PipelineStage.LAYER else (None,)


def experts_of(spec: ParamSpec, arch: ArchSpec) -> Sequence[int | None]:
    """Returns the indices of the experts that have a row of the table; (None,) for a row that is not an expert's."""
    return range(moe_of(arch).num_experts) if spec.kind.is_expert else (None,)


@cache
def _layers(kind: LayerKind, arch: ArchSpec) -> Sequence[int]:
    if kind is LayerKind.LINEAR:
        return arch.linear_layers
    every = range(arch.num_layers)
    if kind is LayerKind.SOFTMAX:
        return every if arch.linear_attention is None else arch.softmax_layers
    experts = arch.moe_layers
    if kind is LayerKind.MOE:
        return experts
    return every if kind is LayerKind.ALL or not experts else [layer for layer in every if layer not in experts]


def counted_tensors(arch: ArchSpec, layout_of: Callable[[ArchSpec], Layout]) -> Iterator[tuple[str, StoredTensor, int]]:
    """Yields (name, tensor, how often the model has it) from layouts of one layer of each kind.

    Args:
        arch: The model.
        layout_of: Function from a model with one layer to a layout.
    """
    for number, (one, count) in enumerate(layer_kinds(arch)):
        for name, stored in layout_of(one).items():
            inside = "layers." in name
            if inside or number == 0:
                yield name, stored, count if inside else 1


@dataclass(frozen=True)
class Part:
    """One of the projections of a row, and its location in the Hugging Face checkpoint.

    Attributes:
        name: Hugging Face name, with `{layer}` and `{expert}`.
        first_row: Index of the projection's first row in that tensor.
        shape: Shape of the projection.
    """

    name: str
    first_row: int
    shape: tuple[int, ...]


def parts_of(spec: ParamSpec, arch: ArchSpec) -> list[Part]:
    """Returns the projections of a row, in Megatron's order; those of a row with a single name are in one tensor."""
    words = dims(arch)
    parts: list[Part] = []
    rows: dict[str, int] = {}
    for index, shape in enumerate(spec.shapes):
        extents = tuple(words[word] for word in shape.split())
        name = spec.hf[0 if len(spec.hf) == 1 else index]
        parts.append(Part(name, rows.get(name, 0), extents))
        rows[name] = rows.get(name, 0) + extents[0]
    return parts


def hf_tensors(spec: ParamSpec, arch: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of each Hugging Face tensor of a row."""
    found: dict[str, tuple[int, ...]] = {}
    for part in parts_of(spec, arch):
        found[part.name] = (part.first_row + part.shape[0], *part.shape[1:])
    return found


def padded_rows(num_rows: int, num_shards: int) -> int:
    """Rounds `num_rows` up to a multiple of `num_shards`."""
    return -(-num_rows // num_shards) * num_shards


def check_divides(arch: ArchSpec, shard: TensorShard) -> None:
    """Raises UserError if `shard.size` ranks cannot share a layer of `arch`; does not check the experts."""
    sizes = [("attention heads", arch.num_heads)]
    if arch.has_dense_layers:
        sizes.append(("intermediate_size", arch.intermediate_size))
    if arch.moe is not None and arch.moe.shared_intermediate_size:
        sizes.append(("shared_expert_intermediate_size", arch.moe.shared_intermediate_size))
    if arch.linear_attention is not None:
        sizes.append(("linear_num_key_heads", arch.linear_attention.num_key_heads))
    for what, size in sizes:
        _check_divides(what, size, shard)
    kv = arch.num_kv_heads
    if kv % shard.size and shard.size % kv:
        raise UserError(
            f"{shard.key}={shard.size} and the model's {kv} key/value heads: one must be a multiple of the other."
        )


def check_experts_divide(moe: MoeSpec, expert: ExpertShard) -> None:
    """Raises UserError if `expert`'s parallel sizes do not divide the number or the width of the experts."""
    _check_divides("experts", moe.num_experts, expert.ep)
    _check_divides("moe_intermediate_size", moe.intermediate_size, expert.etp)


def _check_divides(what: str, size: int, shard: TensorShard) -> None:
    if size % shard.size:
        raise UserError(f"{shard.key}={shard.size} does not divide the model's {what} ({size}). Choose a divisor.")


def shard_row(
    spec: ParamSpec,
    arch: ArchSpec,
    shard: TensorShard,
    *,
    layer: int | None,
    dtype: str,
    qkv_rows: Callable[[ArchSpec, TensorShard], list[Segment]],
    vocab_multiple: int = 1,
) -> StoredTensor:
    """Returns the tensor that one rank stores for a row of the table; experts have `shard_expert`.

    Args:
        spec: Row of the table.
        arch: The model.
        shard: Position in the tensor-parallel group.
        layer: Layer index in the model; None outside the layers.
        dtype: Stored dtype.
        qkv_rows: Order of fused query, key and value rows on this rank.
        vocab_multiple: Multiple to which the vocabulary is padded over all ranks before it is split evenly.
    """
    parts, dtype = parts_of(spec, arch), spec.dtype or dtype
    padding = 0
    dim = 1 if spec.kind is ShardKind.ROW else 0
    size = parts[0].shape[dim]
    if spec.kind is ShardKind.REPLICATED:
        segments = [(0, 0, size)]
    elif spec.kind is ShardKind.VOCAB:
        each = padded_rows(padded_rows(size, vocab_multiple), shard.size) // shard.size
        start = min(size, shard.rank * each)
        stop = min(size, start + each)
        segments = [(0, start, stop)]
        padding = each - (stop - start)
    elif spec.kind is ShardKind.QKV:
        segments = qkv_rows(arch, shard)
    elif spec.kind is ShardKind.KEY_HEADS:
        segments = by_key_head(parts, linear_attention_of(arch).num_key_heads, shard)
    else:  # COLUMN, ROW and GATE_UP
        segments = equal_parts(len(parts), size, shard)
    return stack(parts, segments, layer=layer, dim=dim, dtype=dtype, padding=padding)


def equal_parts(count: int, size: int, shard: TensorShard) -> list[Segment]:
    """Returns the rank's equal part of each of `count` tensors, concatenated."""
    each = size // shard.size
    return [(index, shard.rank * each, (shard.rank + 1) * each) for index in range(count)]


def query_rows(arch: ArchSpec, heads: range) -> list[Segment]:
    """Returns the rows of these heads' queries in part 0 of the fused query, key and value."""
    size = arch.head_dim
    if not arch.output_gate:
        return [(0, heads.start * size, heads.stop * size)]
    return [(0, 2 * head * size, (2 * head + 1) * size) for head in heads]


def gate_rows(arch: ArchSpec, heads: range) -> list[Segment]:
    """Returns the rows of these heads' output gates in part 0 of the fused query, key and value."""
    if not arch.output_gate:
        return []
    return [(0, (2 * head + 1) * arch.head_dim, (2 * head + 2) * arch.head_dim) for head in heads]


def by_key_head(parts: Sequence[Part], heads: int, shard: TensorShard) -> list[Segment]:
    """Returns, for each of the rank's key heads, its rows of every part."""
    own = range(shard.rank * heads // shard.size, (shard.rank + 1) * heads // shard.size)
    rows = [part.shape[0] // heads for part in parts]
    return [(index, head * each, (head + 1) * each) for head in own for index, each in enumerate(rows)]


def shard_expert(
    spec: ParamSpec, arch: ArchSpec, cut: TensorShard, *, layer: int, expert: int, dtype: str
) -> StoredTensor:
    """Returns a rank's part of one expert: [gate rows; up rows], columns of the down projection, or all of a bias.

    Args:
        spec: Row of experts.
        arch: The model.
        cut: Position among the ranks that share the expert.
        layer: Layer index in the model.
        expert: Expert index in the layer.
        dtype: Stored dtype.
    """
    parts = parts_of(spec, arch)
    dim = 1 if spec.kind is ShardKind.EXPERT_DOWN else 0
    size = parts[0].shape[dim]
    segments = [(0, 0, size)] if spec.kind is ShardKind.EXPERT_REPLICATED else equal_parts(len(parts), size, cut)
    return stack(parts, segments, layer=layer, expert=expert, dim=dim, dtype=dtype)


def concat_rows(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Concatenates stored matrices (or vectors) of equal shape by rows."""
    rows, *rest = parts[0].shape
    pieces = [
        Piece(piece.hf_name, piece.src, ((first + number * rows, last + number * rows), *others))
        for number, part in enumerate(parts)
        for piece in part.pieces
        for (first, last), *others in [piece.dst]
    ]
    return StoredTensor((rows * len(parts), *rest), parts[0].dtype, tuple(pieces))


def stack(
    parts: Sequence[Part],
    segments: Sequence[Segment],
    *,
    layer: int | None,
    expert: int | None = None,
    dim: int,
    dtype: str,
    padding: int = 0,
) -> StoredTensor:
    """Concatenates segments along `dim` and appends `padding` rows."""
    shape = parts[0].shape

    def region(start: int, stop: int, offset: int = 0) -> Region:
        """Returns `start` to `stop` along `dim` and all of the other dimension, shifted by `offset` rows."""
        ends = [(start, stop) if axis == dim else (0, extent) for axis, extent in enumerate(shape)]
        ends[0] = (ends[0][0] + offset, ends[0][1] + offset)
        return tuple(ends)

    pieces, end = [], 0
    for index, start, stop in segments:
        if stop > start:
            part = parts[index]
            name = part.name if layer is None else part.name.format(layer=layer, expert=expert)
            pieces.append(Piece(name, region(start, stop, part.first_row), region(end, end + stop - start)))
            end += stop - start
    stored = tuple(end + padding if axis == dim else extent for axis, extent in enumerate(shape))
    return StoredTensor(stored, dtype, tuple(pieces), (region(end, end + padding),) if padding else ())


def allowed_duplicates(arch: ArchSpec) -> dict[str, tuple[str, int]]:
    """Returns Hugging Face name -> (reason why its elements may be stored several times, first row concerned)."""
    found: dict[str, tuple[str, int]] = {}
    for spec in param_specs(arch):
        parts = parts_of(spec, arch)
        if spec.kind in (ShardKind.REPLICATED, ShardKind.EXPERT_REPLICATED):
            rows = {part.name: ("replicated", 0) for part in parts}
        elif spec.kind is ShardKind.VOCAB:
            rows = {part.name: ("embedding", 0) for part in parts}
        elif spec.kind is ShardKind.QKV:
            rows = {}
            for part in reversed(parts[1:]):  # keys and values
                rows[part.name] = ("key/value heads", part.first_row)
        else:
            continue
        for name, reason in rows.items():
            for layer in layers_of(spec, arch):
                for expert in experts_of(spec, arch):
                    found[name if layer is None else name.format(layer=layer, expert=expert)] = reason
    return found
