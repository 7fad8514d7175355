"""The layout of one Megatron-Core rank: tensor, pipeline and virtual-pipeline parallel.

Owns Megatron's names and its order of fused rows. It imports no Megatron: names and shapes are compared with a real
GPTModel in the tests.

Sources, megatron-core 0.16.1: `transformer/attention.py` (query heads of a group, its key, its value, then the next
group; with more ranks than groups the same rows are cut evenly, in the middle of a group), `transformer/mlp.py` (a
rank's gate rows, then its up rows), `transformer/transformer_layer.py: get_transformer_layer_offset`,
`models/common/language_module` (with tied embeddings the last of several stages holds its own copy).
"""

from __future__ import annotations

from mrl.errors import UserError
from mrl.grid import Grid
from mrl.models.base import ArchSpec, Kind, ParamSpec, Place
from mrl.weights.layout import Layout
from mrl.weights.shards import Segment, TensorShard, check_divides, padded_rows, shard_row, table

_OUTPUT = "output_layer.weight"


def padded_vocab(arch: ArchSpec, tp: int) -> int:
    """Embedding rows over all tensor-parallel ranks: the vocabulary, up to a multiple of `tp`."""
    return padded_rows(arch.vocab_size, tp)


def num_layers_per_chunk(arch: ArchSpec, grid: Grid) -> int:
    """Layers in each model chunk.

    Raises:
        UserError: The stages and chunks do not divide the layers.
    """
    chunks = grid.pp * grid.vpp
    if arch.num_layers % chunks:
        virtual = f" x virtual_pipeline_model_parallel_size={grid.vpp}" if grid.vpp > 1 else ""
        raise UserError(
            f"parallel.pipeline_model_parallel_size={grid.pp}{virtual} does not divide the model's "
            f"{arch.num_layers} layers. Choose a divisor."
        )
    return arch.num_layers // chunks


def megatron_layout(arch: ArchSpec, grid: Grid, rank: int, *, dtype: str, te: bool) -> Layout:
    """What `rank` holds: "chunk{v}.{parameter name inside GPTModel}" -> tensor.

    Args:
        arch: The model.
        grid: Ranks of the job.
        rank: Global rank.
        dtype: "float32" or "bfloat16".
        te: Names of TransformerEngine's layer spec, in which a norm is part of the linear that follows.

    Raises:
        UserError: A parallel size does not divide what it splits.
    """
    coords = grid.coords(rank)
    shard = TensorShard(grid.tp, coords.tp, "parallel.tensor_model_parallel_size")
    check_divides(arch, shard)
    per_chunk = num_layers_per_chunk(arch, grid)
    rows = table(arch)
    layout: Layout = {}

    def add(chunk: int, spec: ParamSpec, name: str, layer: int | None) -> None:
        stored = shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=_interleaved_by_group)
        layout[f"chunk{chunk}.{name}"] = stored

    for chunk in range(grid.vpp):
        first = coords.pp == 0 and chunk == 0
        last = coords.pp == grid.pp - 1 and chunk == grid.vpp - 1
        offset = (chunk * grid.pp + coords.pp) * per_chunk
        for spec in rows:
            name = spec.megatron_te if te and spec.megatron_te else spec.megatron
            if spec.place is Place.LAYER:
                for local in range(per_chunk):
                    add(chunk, spec, name.format(layer=local), offset + local)
            elif first if spec.place is Place.FIRST else last:
                add(chunk, spec, name, None)
        if arch.tie_word_embeddings and last and not first:
            embedding = next(spec for spec in rows if spec.kind is Kind.VOCAB)
            add(chunk, embedding, _OUTPUT, None)
    return layout


def _interleaved_by_group(arch: ArchSpec, shard: TensorShard) -> list[Segment]:
    """An equal cut of [group 0: its queries, its key, its value; group 1: ...]."""
    head, queries = arch.head_dim, arch.num_heads // arch.num_kv_heads * arch.head_dim
    fused: list[Segment] = []
    for group in range(arch.num_kv_heads):
        fused.append((0, group * queries, (group + 1) * queries))
        fused.append((1, group * head, (group + 1) * head))
        fused.append((2, group * head, (group + 1) * head))
    total = (arch.num_heads + 2 * arch.num_kv_heads) * head
    if total % shard.size:
        raise UserError(f"{shard.key}={shard.size} does not divide the {total} rows of the fused query, key and value.")
    each = total // shard.size
    return _cut(fused, shard.rank * each, (shard.rank + 1) * each)


def _cut(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """Rows start..stop of the stack of segments."""
    found, offset = [], 0
    for index, first, last in segments:
        low, high = max(start, offset), min(stop, offset + last - first)
        if low < high:
            found.append((index, first + low - offset, first + high - offset))
        offset += last - first
    return found


def megatron_layouts(arch: ArchSpec, grid: Grid, *, dtype: str, te: bool) -> dict[int, Layout]:
    """Rank -> `megatron_layout`; data-parallel copies share one object."""
    shared: dict[tuple[int, int], Layout] = {}
    found = {}
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        if (coords.tp, coords.pp) not in shared:
            shared[coords.tp, coords.pp] = megatron_layout(arch, grid, rank, dtype=dtype, te=te)
        found[rank] = shared[coords.tp, coords.pp]
    return found
