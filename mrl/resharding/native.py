"""Layout of one rank of the native engine.

`qkv` is the rank's query heads, then its key heads, then its value heads. With fewer key/value heads than ranks,
neighbouring ranks store the same head.
"""

from __future__ import annotations

from collections.abc import Callable

from mrl.models.base import ArchSpec, ParamSpec, moe_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout
from mrl.resharding.shards import (
    ExpertShard,
    Segment,
    TensorShard,
    check_divides,
    check_experts_divide,
    concat_rows,
    gate_rows,
    layers_of,
    param_specs,
    query_rows,
    shard_expert,
    shard_row,
)


def native_layout(arch: ArchSpec, tp_size: int, tp_rank: int, dtype: str, *, ep_size: int = 1) -> Layout:
    """Returns the layout of a rank of a replica: `embed`, `layers.{i}.qkv`, ..., `final_norm`, `lm_head` (unless tied).

    A layer's experts are one matrix: the rows of the rank's first expert, then of its second, and so on. Per expert,
    `experts_gate_up` has [gate rows; up rows] and `experts_down` the columns of the rank's part.

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: Dtype of every tensor.
        ep_size: Expert-parallel size inside the replica; `tp_size / ep_size` ranks share each expert.

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP, or `ep_size` its experts.
    """
    return replica_layout(arch, tp_size, tp_rank, dtype, ep_size=ep_size, name_of=_name)


def _name(spec: ParamSpec, layer: int | None) -> str:
    return spec.native if layer is None else spec.native.format(layer=layer)


def replica_layout(
    arch: ArchSpec,
    tp_size: int,
    tp_rank: int,
    dtype: str,
    *,
    ep_size: int,
    name_of: Callable[[ParamSpec, int | None], str],
    dtype_of: Callable[[ParamSpec], str | None] = lambda spec: None,
    vocab_multiple: int = 1,
) -> Layout:
    """Returns the layout of a rank of a replica for an engine that fuses tensors like the native one.

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: Dtype of every tensor.
        ep_size: Expert-parallel size inside the replica.
        name_of: (row, layer index or None outside the layers) -> the engine's name.
        dtype_of: Row that is not an expert's -> the engine's own dtype of it; None: `dtype`.
        vocab_multiple: Multiple to which the engine pads the vocabulary.

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP, or `ep_size` its experts.
    """
    shard = TensorShard(tp_size, tp_rank, "rollout.tensor_model_parallel_size")
    check_divides(arch, shard)
    experts = expert_shard(tp_size, tp_rank, ep_size)
    if arch.moe is not None:
        check_experts_divide(arch.moe, experts)
    layout: Layout = {}
    for spec in param_specs(arch):
        for layer in layers_of(spec, arch):
            name = name_of(spec, layer)
            if spec.kind.is_expert and layer is not None:
                layout[name] = concat_rows(
                    [
                        shard_expert(spec, arch, experts.etp, layer=layer, expert=expert, dtype=dtype)
                        for expert in experts.experts(moe_of(arch))
                    ]
                )
            else:
                layout[name] = shard_row(
                    spec,
                    arch,
                    shard,
                    layer=layer,
                    dtype=dtype_of(spec) or dtype,
                    qkv_rows=by_projection,
                    vocab_multiple=vocab_multiple,
                )
    return layout


def expert_shard(tp_size: int, tp_rank: int, ep_size: int) -> ExpertShard:
    """Returns a replica rank's experts; neighbours get different experts first, as in TensorRT-LLM's `Mapping`."""
    cut_rank, spread_rank = divmod(tp_rank, ep_size)
    return ExpertShard(
        TensorShard(ep_size, spread_rank, "rollout.expert_parallel_size"),
        TensorShard(tp_size // ep_size, cut_rank, "rollout.tensor_model_parallel_size / rollout.expert_parallel_size"),
    )


def by_projection(arch: ArchSpec, shard: TensorShard) -> list[Segment]:
    """Returns the fused rows of an engine's rank: [queries; keys; values; gates if there are any] of its heads."""
    each = arch.num_heads // shard.size
    heads = range(shard.rank * each, (shard.rank + 1) * each)
    kv_heads = max(1, arch.num_kv_heads // shard.size)
    first = shard.rank * arch.num_kv_heads // shard.size
    keys = (first * arch.head_dim, (first + kv_heads) * arch.head_dim)
    return [*query_rows(arch, heads), (1, *keys), (2, *keys), *gate_rows(arch, heads)]


def native_layouts(arch: ArchSpec, grid: ParallelLayout, dtype: str) -> dict[int, Layout]:
    """Returns rank -> `native_layout`; replicas share layout objects."""
    shared = [
        native_layout(arch, grid.rollout_tp, position, dtype, ep_size=grid.rollout_ep)
        for position in range(grid.rollout_tp)
    ]
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in grid.samplers}
