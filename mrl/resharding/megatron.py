"""Layout of one Megatron-Core rank: tensor, expert, pipeline and virtual-pipeline parallel.

It imports no Megatron: the tests compare names and shapes with a real GPTModel.

Sources, megatron-core 0.16.1: `transformer/attention.py` (query heads of a group, its key, its value, then the next
group; with more ranks than groups the same rows are split evenly, inside a group), `transformer/mlp.py` (a rank's gate
rows, then its up rows), `transformer/moe/experts.py`, `transformer/transformer_layer.py:
get_transformer_layer_offset`, `transformer/transformer_block.py: get_num_layers_to_build`,
`models/common/language_module` (with tied embeddings the last of several stages has its own copy).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mrl.errors import UserError
from mrl.models.base import ArchSpec, ParamSpec, PipelineStage, ShardKind, moe_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Piece, StoredTensor
from mrl.resharding.shards import (
    ExpertShard,
    Segment,
    TensorShard,
    check_divides,
    check_experts_divide,
    gate_rows,
    layers_of,
    padded_rows,
    param_specs,
    query_rows,
    shard_expert,
    shard_row,
)

OUTPUT = "output_layer.weight"
"""Layer after the last norm: the output head, or a critic's value head."""
VOCABULARY = ("embedding.word_embeddings.weight", OUTPUT)
"""Tensors whose vocabulary rows are padded."""


def padded_vocab(arch: ArchSpec, tp: int) -> int:
    """Returns the embedding rows over all tensor-parallel ranks: the vocabulary, rounded up to a multiple of `tp`."""
    return padded_rows(arch.vocab_size, tp)


def stage_layers(arch: ArchSpec, grid: ParallelLayout) -> list[list[int]]:
    """Returns the layer indices of each pipeline stage, ascending.

    Raises:
        UserError: The stages and chunks do not divide the layers.
    """
    layers = chunk_layers(arch, grid)
    return [[layer for chunk in range(grid.vpp) for layer in layers[stage, chunk]] for stage in range(grid.pp)]


def stage_moe_layers(arch: ArchSpec, grid: ParallelLayout) -> list[list[int]]:
    """Returns the indices of the layers with experts of each pipeline stage, ascending; arguments as `stage_layers`."""
    return [[layer for layer in stage if layer in arch.moe_layers] for stage in stage_layers(arch, grid)]


def chunk_layers(arch: ArchSpec, grid: ParallelLayout) -> dict[tuple[int, int], range]:
    """Returns (stage, chunk) -> its layer indices.

    Raises:
        UserError: The stages and chunks do not divide the layers.
    """
    ends = {0: grid.first_stage_layers, grid.pp - 1: grid.last_stage_layers}
    fixed = {stage: count for stage, count in ends.items() if count is not None}
    left, stages = arch.num_layers - sum(fixed.values()), grid.pp - len(fixed)
    if left < 0 or left % max(1, stages * (1 if fixed else grid.vpp)) or (left and not stages):
        sizes = {
            "pipeline_model_parallel_size": grid.pp,
            "virtual_pipeline_model_parallel_size": grid.vpp if grid.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": grid.first_stage_layers,
            "num_layers_in_last_pipeline_stage": grid.last_stage_layers,
        }
        given = "parallel." + " x ".join(f"{key}={size}" for key, size in sizes.items() if size is not None)
        rest = f"; {left} layers are left for {stages} stages" if fixed else ""
        raise UserError(f"{given} does not divide the model's {arch.num_layers} layers{rest}. Choose a divisor.")
    found: dict[tuple[int, int], range] = {}
    start = 0
    for chunk in range(grid.vpp):
        for stage in range(grid.pp):
            count = fixed.get(stage, left // max(1, stages))
            if count % grid.vpp or not count:
                raise UserError(
                    f"parallel.virtual_pipeline_model_parallel_size={grid.vpp} does not divide the {count} layers of "
                    f"pipeline stage {stage}. Choose a divisor."
                )
            found[stage, chunk] = range(start, start + count // grid.vpp)
            start += count // grid.vpp
    return found


@dataclass(frozen=True)
class RankTensor:
    """One tensor of a rank and its position in the model.

    Attributes:
        spec: Row of the family's table.
        chunk: Virtual pipeline chunk.
        stored: Shape, dtype and pieces of the tensor.
        local_layer: Layer index inside the chunk; None outside the layers.
        layer: Layer index in the model; None outside the layers.
        local_expert: Expert index on the rank; None for tensors that are not experts.
        expert: Expert index in the layer; None for tensors that are not experts.
        is_copy: True for the last stage's copy of a tied embedding.
    """

    spec: ParamSpec
    chunk: int
    stored: StoredTensor
    local_layer: int | None = None
    layer: int | None = None
    local_expert: int | None = None
    expert: int | None = None
    is_copy: bool = False

    @property
    def is_replicated(self) -> bool:
        """True if every tensor-parallel rank (of experts: expert-tensor-parallel) has the complete tensor."""
        return self.spec.kind in (ShardKind.REPLICATED, ShardKind.EXPERT_REPLICATED)


def rank_tensors(arch: ArchSpec, grid: ParallelLayout, rank: int, *, dtype: str) -> Iterator[RankTensor]:
    """Yields the tensors of `rank` in the order of Megatron's chunks.

    Raises:
        UserError: A parallel size does not divide the model's dimensions.
    """
    coords = grid.coords(rank)
    shard = TensorShard(grid.tp, coords.tp, "parallel.tensor_model_parallel_size")
    check_divides(arch, shard)
    experts = expert_shard(grid, rank)
    if arch.moe is not None:
        check_experts_divide(arch.moe, experts)
    layers = chunk_layers(arch, grid)
    rows = param_specs(arch)

    def sharded(spec: ParamSpec, layer: int | None) -> StoredTensor:
        return shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=_interleaved_by_group)

    for chunk in range(grid.vpp):
        first = coords.pp == 0 and chunk == 0
        last = coords.pp == grid.pp - 1 and chunk == grid.vpp - 1
        for spec in rows:
            if spec.place is not PipelineStage.LAYER:
                if first if spec.place is PipelineStage.FIRST else last:
                    yield RankTensor(spec, chunk, sharded(spec, None))
                continue
            present = layers_of(spec, arch)
            for local, layer in enumerate(layers[coords.pp, chunk]):
                if layer not in present:
                    continue
                if not spec.kind.is_expert:
                    yield RankTensor(spec, chunk, sharded(spec, layer), local, layer)
                    continue
                for index, expert in enumerate(experts.experts(moe_of(arch))):
                    stored = shard_expert(spec, arch, experts.etp, layer=layer, expert=expert, dtype=dtype)
                    yield RankTensor(spec, chunk, stored, local, layer, index, expert)
        if arch.tie_word_embeddings and last and not first:
            embedding = next(spec for spec in rows if spec.kind is ShardKind.VOCAB)
            yield RankTensor(embedding, chunk, sharded(embedding, None), is_copy=True)


def megatron_layout(arch: ArchSpec, grid: ParallelLayout, rank: int, *, dtype: str, te: bool) -> Layout:
    """Returns the layout of `rank`: "chunk{v}.{parameter name inside GPTModel}" -> tensor.

    Args:
        arch: The model.
        grid: Parallel layout of the job.
        rank: Global rank.
        dtype: Dtype of every tensor.
        te: Use the names of TransformerEngine's layer spec, in which a norm is part of the linear that
            follows and the experts of a layer are one grouped module.

    Raises:
        UserError: A parallel size does not divide the model's dimensions.
    """
    layout: Layout = {}
    for tensor in rank_tensors(arch, grid, rank, dtype=dtype):
        spec = tensor.spec
        name = spec.megatron_te if te and spec.megatron_te else spec.megatron
        name = OUTPUT if tensor.is_copy else name.format(layer=tensor.local_layer, expert=tensor.local_expert)
        layout[f"chunk{tensor.chunk}.{name}"] = tensor.stored
    return layout


def expert_shard(grid: ParallelLayout, rank: int) -> ExpertShard:
    """Returns a rank's experts and its part of each."""
    place = grid.expert_coords(rank)
    return ExpertShard(
        TensorShard(grid.ep, place.ep, "parallel.expert_model_parallel_size"),
        TensorShard(grid.expert_tp, place.etp, "parallel.expert_tensor_parallel_size"),
    )


def _interleaved_by_group(arch: ArchSpec, shard: TensorShard) -> list[Segment]:
    """Returns a rank's equal part of [group 0: queries, gates if there are any, key, value; group 1: ...]."""
    head, heads = arch.head_dim, arch.num_heads // arch.num_kv_heads
    fused: list[Segment] = []
    for group in range(arch.num_kv_heads):
        fused += query_rows(arch, range(group * heads, (group + 1) * heads))
        fused += gate_rows(arch, range(group * heads, (group + 1) * heads))
        fused.append((1, group * head, (group + 1) * head))
        fused.append((2, group * head, (group + 1) * head))
    total = sum(stop - start for _, start, stop in fused)
    if total % shard.size:
        raise UserError(f"{shard.key}={shard.size} does not divide the {total} rows of the fused query, key and value.")
    each = total // shard.size
    return _slice_segments(fused, shard.rank * each, (shard.rank + 1) * each)


def _slice_segments(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """Returns rows start..stop of the concatenated segments."""
    found, offset = [], 0
    for index, first, last in segments:
        low, high = max(start, offset), min(stop, offset + last - first)
        if low < high:
            found.append((index, first + low - offset, first + high - offset))
        offset += last - first
    return found


def megatron_layouts(arch: ArchSpec, grid: ParallelLayout, *, dtype: str, te: bool) -> dict[int, Layout]:
    """Returns rank -> `megatron_layout`; data- and context-parallel copies share one object."""
    shared: dict[tuple[int, ...], Layout] = {}
    found = {}
    for rank in grid.trainers:
        coords, experts = grid.coords(rank), grid.expert_coords(rank)
        place = (coords.tp, coords.pp, *((experts.ep, experts.etp) if arch.moe else ()))
        if place not in shared:
            shared[place] = megatron_layout(arch, grid, rank, dtype=dtype, te=te)
        found[rank] = shared[place]
    return found


def output_name(names: Iterable[str]) -> str:
    """Returns the name of the weight that computes logits, tied to the embedding or not, in a last stage's layout."""
    embedding, own = VOCABULARY
    found = {name.partition(".")[2]: name for name in names}
    return found.get(own) or found[embedding]


def output_rows(own: StoredTensor, other: ArchSpec) -> StoredTensor:
    """Returns the rows of another model's output weight for the tokens of this rank.

    Args:
        own: This rank's output weight; its first rows are tokens, the others padding.
        other: A model with the same tokenizer; its vocabulary may be smaller or larger.
    """
    (rows,) = [piece.src[0] for piece in own.pieces] or [(0, 0)]
    end = max(rows[0], min(rows[1], other.vocab_size))
    shape = (end - rows[0], other.hidden_size)
    layout = hf_layout(other, own.dtype)
    (head,) = [name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in layout][:1]
    piece = Piece(head, ((rows[0], end), (0, shape[1])), ((0, shape[0]), (0, shape[1])))
    return StoredTensor(shape, own.dtype, (piece,) if shape[0] else ())
