"""Tensors of Megatron's distributed checkpoint: keys, and the region of each that a rank's tensor is.

A checkpoint consists of global tensors: tensor parallelism is undone, the layers are the first dimension and the
experts the second. A rank's tensor is a box in one of them (two boxes for [gate; up], where the gate halves of all
ranks come first). How files store boxes is not known here. It imports no Megatron: the tests compare keys and shapes
with real checkpoints.

Sources, megatron-core 0.16.1: `transformer/transformer_block.py: sharded_state_dict` (layers stacked, or one key per
layer), `transformer/moe/experts.py` (experts stacked, or one key each), `transformer/mlp.py:
apply_swiglu_sharded_factory`, `models/gpt/gpt_layer_specs.py: sharded_state_dict_keys_map` (the local layer spec saves
norms under the names of TransformerEngine's fused linears), `dist_checkpointing/mapping.py: ShardedObject.unique_key`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from mrl.models.base import ArchSpec, ParamSpec, PipelineStage, ShardKind, moe_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Piece, Region, StoredTensor
from mrl.resharding.megatron import RankTensor, rank_tensors
from mrl.resharding.regions import full_region, intersect, translate
from mrl.resharding.shards import layers_of

EXTRA_STATE = "_extra_state"
"""Key suffix of a module's state that is not a weight: TransformerEngine's fp8 scales, or nothing."""

_INPUT_NORM = "input_layernorm."
_FUSED_NORMS = (
    (_INPUT_NORM, "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_GATED = (ShardKind.GATE_UP, ShardKind.EXPERT_GATE_UP)
_HALVES = ("_w", "_v")
_CORE_ATTENTION = "decoder.layers.{layer}.self_attention.core_attention"


class KeyFormat(Enum):
    """The ways in which a checkpoint splits a row of the table into global tensors."""

    STACKED = "layers and experts stacked"
    PER_LAYER = "a tensor for each layer, experts stacked"
    SINGLE = "a tensor for each layer and expert, gate and up separate"


@dataclass(frozen=True)
class Shard:
    """A rank's box in a global tensor.

    Attributes:
        key: Key of the global tensor.
        global_shape: Shape of the global tensor.
        offsets: First index of the box in each dimension; its extent is `stored.view`.
        stored: Content of the box.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    stored: StoredTensor

    @property
    def name(self) -> str:
        """Name of the box in a layout."""
        return f"{self.key}[{','.join(map(str, self.offsets))}]"


def written_format(arch: ArchSpec) -> KeyFormat:
    """Returns how Megatron splits a model's tensors: layers are stacked if all have the same parameters."""
    alike = len(arch.moe_layers) in (0, arch.num_layers) and arch.linear_attention is None
    return KeyFormat.STACKED if alike else KeyFormat.PER_LAYER


def rank_shards(arch: ArchSpec, grid: ParallelLayout, rank: int, *, dtype: str) -> Iterator[Shard]:
    """Yields the boxes that `rank` writes: its tensors that no lower data-, context- or tensor-parallel copy also has.

    Keys are those of `written_format`. A norm whose key depends on the layer spec is written
    under each of its keys, so that models of either spec can load it.

    Raises:
        UserError: A parallel size does not divide the model's dimensions.
    """
    coords, experts, spelling = grid.coords(rank), grid.expert_coords(rank), written_format(arch)
    first_copy = coords.dp == 0 and coords.cp == 0
    for tensor in rank_tensors(arch, grid, rank, dtype=dtype):
        spec = tensor.spec
        if spec.kind.is_expert:
            is_writer, size, index = experts.edp == 0, grid.expert_tp, experts.etp
        else:
            is_writer, size, index = first_copy and not tensor.is_copy, grid.tp, coords.tp
        if spec.kind in (ShardKind.REPLICATED, ShardKind.EXPERT_REPLICATED):
            is_writer, size, index = is_writer and index == 0, 1, 0
        if not is_writer:
            continue
        lead = _leading_dims(tensor, spelling, arch)
        parts = _split_rows_in_half(tensor.stored) if spec.kind in _GATED else [tensor.stored]
        for number, part in enumerate(parts):
            axis = 1 if spec.kind in (ShardKind.ROW, ShardKind.EXPERT_DOWN) else 0
            shape, offsets = list(part.shape), [0] * len(part.shape)
            shape[axis] *= size * len(parts)
            offsets[axis] = (number * size + index) * part.shape[axis]
            view = (1,) * len(lead) + part.shape
            for stem in _written_key_stems(spec):
                yield Shard(
                    key=_key(stem, spelling, tensor),
                    global_shape=(*(extent for _, extent in lead), *shape),
                    offsets=(*(place for place, _ in lead), *offsets),
                    stored=StoredTensor(part.shape, part.dtype, part.pieces, part.padding, view),
                )


@dataclass(frozen=True)
class StackedPiece:
    """A piece of one of the matrices (or vectors) stacked in a global tensor; `lead` is the index of that matrix."""

    lead: tuple[int, ...]
    piece: Piece

    def to_global(self, region: Region) -> Region:
        """Maps a region of the Hugging Face tensor, inside `piece.src`, to coordinates of the global tensor."""
        return (*((index, index + 1) for index in self.lead), *translate(region, self.piece.src, self.piece.dst))

    def to_hf(self, region: Region) -> Region:
        """Maps a region of the global tensor to coordinates of the Hugging Face tensor."""
        return translate(region[len(self.lead) :], self.piece.dst, self.piece.src)


@dataclass
class Stack:
    """A global tensor without vocabulary padding: its shape and its pieces."""

    shape: tuple[int, ...]
    parts: list[StackedPiece] = field(default_factory=list)


def global_tensors(arch: ArchSpec, keys: Collection[str]) -> dict[str, Stack]:
    """Returns key -> global tensor for all weights of the model.

    Args:
        arch: The model.
        keys: Keys of the checkpoint; each row of the table is searched in every spelling. A row that is missing in all
            of them gets its usual key.
    """
    found: dict[str, Stack] = {}
    chosen: dict[ParamSpec, tuple[str, KeyFormat]] = {}
    for tensor in rank_tensors(arch, ParallelLayout(1), 0, dtype="float32"):
        spec = tensor.spec
        if spec not in chosen:
            chosen[spec] = _find_key_format(spec, keys, arch)
        stem, spelling = chosen[spec]
        separate = spelling is KeyFormat.SINGLE and spec.kind in _GATED
        halves = zip(_HALVES, _split_rows_in_half(tensor.stored), strict=True) if separate else [("", tensor.stored)]
        lead = _leading_dims(tensor, spelling, arch)
        for half, stored in halves:
            key = _key(stem, spelling, tensor) + half
            stack = found.setdefault(key, Stack((*(extent for _, extent in lead), *stored.shape)))
            stack.parts += [StackedPiece(tuple(index for index, _ in lead), piece) for piece in stored.pieces]
    return found


def key_formats(arch: ArchSpec, keys: Collection[str]) -> set[KeyFormat]:
    """Returns the spellings of the layers' tensors in a checkpoint."""
    rows = {tensor.spec for tensor in rank_tensors(arch, ParallelLayout(1), 0, dtype="float32")}
    return {_find_key_format(spec, keys, arch)[1] for spec in rows if spec.place is PipelineStage.LAYER}


def known_keys(arch: ArchSpec) -> set[str]:
    """Returns every key that `rank_shards` can yield, under any parallel layout."""
    return {shard.key for shard in rank_shards(arch, ParallelLayout(1), 0, dtype="float32")}


def extra_state_keys(arch: ArchSpec) -> list[str]:
    """Returns the keys under which Megatron looks for the extra state of each module of the decoder and of each expert.

    The local layer spec has one for every linear; TransformerEngine also for the core attention and its norms.
    """
    found: dict[str, None] = {}
    spelling = written_format(arch)
    for tensor in rank_tensors(arch, ParallelLayout(1), 0, dtype="float32"):
        if tensor.spec.place is PipelineStage.FIRST:
            continue
        lead = _leading_dims(tensor, spelling, arch)
        modules = [_key(stem, spelling, tensor).rpartition(".")[0] for stem in _written_key_stems(tensor.spec)]
        if tensor.spec.kind is ShardKind.QKV:
            modules.append(_key(_CORE_ATTENTION, spelling, tensor))
        for module in modules:
            place = ".".join(str(index) for index, _ in lead) or "0"
            extent = ".".join(str(extent) for _, extent in lead) or "1"
            found[f"{module}.{EXTRA_STATE}/shard_{place}_{extent}"] = None
    return list(found)


def _key_stems(spec: ParamSpec) -> list[str]:
    """Returns a row's names with `{layer}` and `{expert}`: TransformerEngine's, the local spec's, the module's own."""
    if spec.kind.is_expert:
        return [spec.megatron.replace(".local_experts.", ".experts.")]
    local = spec.megatron
    for own, fused in _FUSED_NORMS:
        if own == _INPUT_NORM and spec.megatron_te is None:
            continue  # of latent attention, which has no such linear
        local = local.replace(f".{own}", f".{fused}")
    return list(dict.fromkeys([spec.megatron_te or spec.megatron, local, spec.megatron]))


def _written_key_stems(spec: ParamSpec) -> list[str]:
    stems = _key_stems(spec)
    return stems if spec.megatron_te is None else stems[:1]


def _key(stem: str, spelling: KeyFormat, tensor: RankTensor | None = None) -> str:
    if spelling is not KeyFormat.SINGLE:
        stem = stem.replace(".{expert}", "")
    if spelling is KeyFormat.STACKED:
        stem = stem.replace(".{layer}", "")
    return stem if tensor is None else stem.format(layer=tensor.layer, expert=tensor.expert)


def _find_key_format(spec: ParamSpec, keys: Collection[str], arch: ArchSpec) -> tuple[str, KeyFormat]:
    """Returns the first name and spelling under which the checkpoint has the row's first tensor."""
    first = layers_of(spec, arch)[0]
    stems = _key_stems(spec)
    for stem in stems:
        for spelling in KeyFormat:
            half = _HALVES[0] if spelling is KeyFormat.SINGLE and spec.kind in _GATED else ""
            if _key(stem, spelling).format(layer=first, expert=0) + half in keys:
                return stem, spelling
    return stems[0], written_format(arch)


def _leading_dims(tensor: RankTensor, spelling: KeyFormat, arch: ArchSpec) -> list[tuple[int, int]]:
    """Returns (index, extent) of each leading dimension of the global tensor: layers, experts."""
    lead = []
    if tensor.layer is not None and spelling is KeyFormat.STACKED:
        lead.append((tensor.layer, arch.num_layers))
    if tensor.expert is not None and spelling is not KeyFormat.SINGLE:
        lead.append((tensor.expert, moe_of(arch).num_experts))
    return lead


def _split_rows_in_half(stored: StoredTensor) -> list[StoredTensor]:
    """Returns the upper and the lower half of the rows."""
    rows, *rest = stored.shape
    half = rows // 2
    found = []
    for start in (0, half):
        box = ((start, start + half), *full_region(rest))
        pieces = []
        for piece in stored.pieces:
            both = intersect(piece.dst, box)
            if both is not None:
                own = translate(both, box, full_region((half, *rest)))
                pieces.append(Piece(piece.hf_name, translate(both, piece.dst, piece.src), own))
        found.append(StoredTensor((half, *rest), stored.dtype, tuple(pieces)))
    return found
