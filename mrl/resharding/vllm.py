"""The layout of one rank of vLLM: its fused tensors, by its own names, in Hugging Face coordinates.

Owns its names and its padding: `qkv_proj` holds the rank's query heads, then its key heads, then its value heads;
`gate_up_proj` [gate; up]; of the experts `w13_weight` [gate; up] of one after the other and `w2_weight` their columns;
the vocabulary is padded to a multiple of 64. Read in vLLM 0.32 (`QKVParallelLinear`, `VocabParallelEmbedding`,
`RoutedExperts`); the engine holds every name and shape against vLLM's own parameters.
"""

from __future__ import annotations

from mrl.models.base import ArchSpec, Kind, ParamSpec
from mrl.parallel_layout import Grid
from mrl.resharding.fp8 import grids_of, in_fp8, scale_tables
from mrl.resharding.layout import Layout
from mrl.resharding.native import replica_layout

VOCAB_MULTIPLE = 64
"""To which vLLM pads the vocabulary, over all ranks."""

FUSED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))
"""The first of the projections that vLLM keeps as one -> its name for all of them."""

EXPERTS = {Kind.EXPERT_GATE_UP: "w13_weight", Kind.EXPERT_DOWN: "w2_weight"}


def vllm_layout(
    arch: ArchSpec, tp_size: int, tp_rank: int, dtype: str, *, ep_size: int = 1, quantization: str | None = None
) -> Layout:
    """What a rank of a replica stores.

    Experts are matrices [experts x rows, columns], of which vLLM's [experts, rows, columns] are a view.

    Args:
        arch: The model.
        tp_size: Ranks of a replica.
        tp_rank: Position in the replica.
        dtype: Of every tensor that is not quantised.
        ep_size: 1: each rank has a part of every expert; `tp_size`: whole experts, as `enable_expert_parallel` has it.
        quantization: `rollout.quantization`; the scales of a fused matrix' parts lie one below the other, as the parts.

    Raises:
        UserError: `tp_size` does not divide the model's heads or MLP, or `ep_size` its experts.
    """
    own = replica_layout(arch, tp_size, tp_rank, dtype, ep_size=ep_size, name_of=_name, vocab_multiple=VOCAB_MULTIPLE)
    grids = grids_of(arch, quantization)
    stored = in_fp8(own, grids)
    return {**stored, **scale_tables(stored, grids)}


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
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in grid.samplers}
