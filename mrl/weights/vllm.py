"""The layout of one rank of vLLM: its fused tensors, by its own names, in Hugging Face coordinates.

Owns its names and its padding: `qkv_proj` holds the rank's query heads, then its key heads, then its value heads;
`gate_up_proj` [gate; up]; of the experts `w13_weight` [gate; up] of one after the other and `w2_weight` their columns;
the vocabulary is padded to a multiple of 64. Read in vLLM 0.32 (`QKVParallelLinear`, `VocabParallelEmbedding`,
`RoutedExperts`); the engine holds every name and shape against vLLM's own parameters.
"""

from __future__ import annotations

from mrl.grid import Grid
from mrl.models.base import ArchSpec, Kind, ParamSpec, Place, moe_of
from mrl.weights.layout import Layout, StoredTensor
from mrl.weights.native import by_projection, expert_shard
from mrl.weights.shards import (
    TensorShard,
    check_divides,
    check_experts_divide,
    padded_rows,
    parts_of,
    pile,
    shard_expert,
    shard_row,
    stack,
    table,
)

VOCAB_MULTIPLE = 64
"""To which vLLM pads the vocabulary, over all ranks."""

FUSED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))
"""The first of the projections that vLLM keeps as one -> its name for all of them."""

EXPERTS = {Kind.EXPERT_GATE_UP: "w13_weight", Kind.EXPERT_DOWN: "w2_weight"}


def vllm_layout(arch: ArchSpec, tp_size: int, tp_rank: int, dtype: str, *, ep_size: int = 1) -> Layout:
    """What a rank of a replica stores.

    Experts are matrices [experts x rows, columns], of which vLLM's [experts, rows, columns] are a view.

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: Of every tensor.
        ep_size: 1: each rank has a part of every expert; `tp_size`: whole experts, as `enable_expert_parallel` has it.

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP, or `ep_size` its experts.
    """
    shard = TensorShard(tp_size, tp_rank, "rollout.tensor_model_parallel_size")
    check_divides(arch, shard)
    experts = expert_shard(tp_size, tp_rank, ep_size)
    if arch.moe is not None:
        check_experts_divide(arch.moe, experts)
    layout: Layout = {}
    for spec in table(arch):
        for layer in range(arch.num_layers) if spec.place is Place.LAYER else (None,):
            name = _name(spec, layer)
            if spec.kind.is_expert and layer is not None:
                layout[name] = pile(
                    [
                        shard_expert(spec, arch, experts.cut, layer=layer, expert=expert, dtype=dtype)
                        for expert in experts.experts(moe_of(arch))
                    ]
                )
            elif spec.kind is Kind.VOCAB:
                layout[name] = _vocabulary(spec, arch, shard, dtype)
            else:
                layout[name] = shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=by_projection)
    return layout


def _vocabulary(spec: ParamSpec, arch: ArchSpec, shard: TensorShard, dtype: str) -> StoredTensor:
    """An equal part of the padded rows, so that the padding may begin before the last rank."""
    parts = parts_of(spec, arch)
    size = parts[0].shape[0]
    each = padded_rows(size, VOCAB_MULTIPLE) // shard.size
    start, stop = min(size, shard.rank * each), min(size, (shard.rank + 1) * each)
    return stack(parts, [(0, start, stop)], layer=None, dim=0, dtype=dtype, padding=each - (stop - start))


def _name(spec: ParamSpec, layer: int | None) -> str:
    """The name of a row: the Hugging Face name, but for what it keeps as one."""
    name = spec.hf[0] if layer is None else spec.hf[0].format(layer=layer, expert=0)
    if spec.kind.is_expert:
        return f"{name.partition('.experts.')[0]}.experts.{EXPERTS[spec.kind]}"
    for first, fused in FUSED:
        if spec.kind in (Kind.QKV, Kind.GATE_UP):
            name = name.replace(f".{first}.", f".{fused}.")
    return name


def vllm_layouts(arch: ArchSpec, grid: Grid, dtype: str) -> dict[int, Layout]:
    """Rank -> `vllm_layout`; the replicas share their objects."""
    shared = [
        vllm_layout(arch, grid.rollout_tp, position, dtype, ep_size=grid.rollout_ep)
        for position in range(grid.rollout_tp)
    ]
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in range(grid.world_size)}
