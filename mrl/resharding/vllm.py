"""Layout of one vLLM rank: its fused tensors under vLLM's names, in Hugging Face coordinates.

`qkv_proj` is the rank's query heads, then its key heads, then its value heads; `gate_up_proj` is [gate; up]; of the
experts, `w13_weight` is [gate; up] of each expert and `w2_weight` the columns of each; the vocabulary is padded to a
multiple of 64. Source: vLLM 0.32 (`QKVParallelLinear`, `VocabParallelEmbedding`, `RoutedExperts`). The engine compares
every name and shape with vLLM's own parameters.
"""

from __future__ import annotations

from mrl.models.base import ArchSpec, ParamSpec, ShardKind
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.fp8 import block_grids, fp8_layout, scale_tables
from mrl.resharding.layout import Layout
from mrl.resharding.native import replica_layout

VOCAB_MULTIPLE = 64
"""Multiple to which vLLM pads the vocabulary, over all ranks."""

FUSED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))
"""(first of the projections that vLLM fuses, vLLM's name of the fused tensor)."""

EXPERTS = {ShardKind.EXPERT_GATE_UP: "w13_weight", ShardKind.EXPERT_DOWN: "w2_weight"}


def vllm_layout(
    arch: ArchSpec, tp_size: int, tp_rank: int, dtype: str, *, ep_size: int = 1, quantization: str | None = None
) -> Layout:
    """Returns the layout of one rank of a replica.

    Experts are matrices [experts x rows, columns]; vLLM's [experts, rows, columns] are views of them.

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: Dtype of every tensor that is not quantized.
        ep_size: 1: each rank has a part of every expert; `tp_size`: complete experts, as with `enable_expert_parallel`.
        quantization: `rollout.quantization`; the scales of a fused matrix are stacked in the order of its parts.

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP, or `ep_size` its experts.
    """
    own = replica_layout(
        arch,
        tp_size,
        tp_rank,
        dtype,
        ep_size=ep_size,
        name_of=_name,
        dtype_of=lambda spec: spec.vllm_dtype,
        vocab_multiple=VOCAB_MULTIPLE,
    )
    grids = block_grids(arch, quantization)
    stored = fp8_layout(own, grids)
    return {**stored, **scale_tables(stored, grids)}


def _name(spec: ParamSpec, layer: int | None) -> str:
    """Returns vLLM's name of a row: the Hugging Face name, or that of the fused tensor."""
    name = spec.hf[0] if layer is None else spec.hf[0].format(layer=layer, expert=0)
    if spec.kind.is_expert:
        return f"{name.partition('.experts.')[0]}.experts.{EXPERTS[spec.kind]}"
    for first, fused in FUSED:
        if spec.kind in (ShardKind.QKV, ShardKind.GATE_UP):
            name = name.replace(f".{first}.", f".{fused}.")
    return name


def vllm_layouts(arch: ArchSpec, grid: ParallelLayout, dtype: str) -> dict[int, Layout]:
    """Returns rank -> `vllm_layout`; replicas share layout objects."""
    shared = [
        vllm_layout(arch, grid.rollout_tp, position, dtype, ep_size=grid.rollout_ep)
        for position in range(grid.rollout_tp)
    ]
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in grid.samplers}
