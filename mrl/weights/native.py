"""The layout of one rank of the native engine.

Owns its names and its order of fused rows: `qkv` holds the rank's query heads, then its key heads, then its value
heads. With fewer key/value heads than ranks, neighbouring ranks hold the same head.
"""

from __future__ import annotations

from mrl.grid import Grid
from mrl.models.base import ArchSpec, Place
from mrl.weights.layout import Layout
from mrl.weights.shards import Segment, TensorShard, check_divides, shard_row, table


def native_layout(arch: ArchSpec, tp_size: int, tp_rank: int, dtype: str) -> Layout:
    """What a rank of a replica holds: `embed`, `layers.{i}.qkv`, ..., `final_norm`, `lm_head` (unless tied).

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: "float32" or "bfloat16".

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP.
    """
    shard = TensorShard(tp_size, tp_rank, "rollout.tensor_model_parallel_size")
    check_divides(arch, shard)
    layout: Layout = {}
    for spec in table(arch):
        for layer in range(arch.num_layers) if spec.place is Place.LAYER else (None,):
            name = spec.native if layer is None else spec.native.format(layer=layer)
            layout[name] = shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=_by_projection)
    return layout


def _by_projection(arch: ArchSpec, shard: TensorShard) -> list[Segment]:
    """[queries; keys; values] of the rank's heads."""
    queries = arch.num_heads // shard.size * arch.head_dim
    kv_heads = max(1, arch.num_kv_heads // shard.size)
    first = shard.rank * arch.num_kv_heads // shard.size
    keys = (first * arch.head_dim, (first + kv_heads) * arch.head_dim)
    return [(0, shard.rank * queries, (shard.rank + 1) * queries), (1, *keys), (2, *keys)]


def native_layouts(arch: ArchSpec, grid: Grid, dtype: str) -> dict[int, Layout]:
    """Rank -> `native_layout`; the replicas share their objects."""
    shared = [native_layout(arch, grid.rollout_tp, position, dtype) for position in range(grid.rollout_tp)]
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in range(grid.world_size)}
