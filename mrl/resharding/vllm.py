"""Layout of one vLLM rank: its fused tensors under vLLM's names, in Hugging Face coordinates.

`qkv_proj` is the rank's query heads, then its key heads, then its value heads; `gate_up_proj` is [gate; up]; of the
experts, `w13_weight` is [gate; up] of each expert and `w2_weight` the columns of each; the vocabulary is padded to a
multiple of 64. The latent vectors of queries and of keys and values come from one `fused_qkv_a_proj`. With
`Family.fused_experts` gate and up rows alternate, and `w13_weight[0::2]` has those of gate.
Source: vLLM 0.32 (`QKVParallelLinear`, `VocabParallelEmbedding`, `RoutedExperts`). The engine compares every name and
shape with vLLM's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mrl.models.base import ArchSpec, ParamSpec, ShardKind
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.fp8 import block_grids, fp8_layout, scale_tables
from mrl.resharding.layout import Layout, Piece, StoredTensor
from mrl.resharding.native import expert_shard, replica_layout
from mrl.resharding.regions import full_region

VOCAB_MULTIPLE = 64
"""Multiple to which vLLM pads the vocabulary, over all ranks."""

FUSED = (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"))
"""(first of the projections that vLLM fuses, vLLM's name of the fused tensor)."""

EXPERTS = {ShardKind.EXPERT_GATE_UP: "w13", ShardKind.EXPERT_DOWN: "w2", ShardKind.EXPERT_REPLICATED: "w2"}
"""vLLM's names of a layer's experts, without "_weight" and "_bias"."""
LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj")
"""Projections to latent vectors that vLLM fuses, and its name of the fused tensor."""
ALTERNATING = ("[0::2]", "[1::2]")
"""Ends of the names of gate and up rows that alternate in one tensor of vLLM."""


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
    family = family_of(arch)
    own = replica_layout(
        arch,
        tp_size,
        tp_rank,
        dtype,
        ep_size=ep_size,
        name_of=lambda spec, layer: _name(spec, layer, family.vllm_names),
        dtype_of=lambda spec: spec.vllm_dtype,
        vocab_multiple=VOCAB_MULTIPLE,
    )
    if family.fused_experts:
        adds_bias = expert_shard(tp_size, tp_rank, ep_size).etp.rank == 0
        own = dict(_apart(own, adds_bias=adds_bias))
    if arch.mla is not None and arch.mla.q_lora_rank is not None:
        own = dict(_with_fused_latents(own))
    grids = block_grids(arch, quantization)
    stored = fp8_layout(own, grids)
    return {**stored, **scale_tables(stored, grids)}


def _with_fused_latents(layout: Layout) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors with the rows of the two projections to latent vectors in one tensor."""
    queries, keys, fused = (f".{name}." for name in LATENT)
    for name, stored in layout.items():
        if queries in name:
            below = layout[name.replace(queries, keys)]
            rows, columns = stored.shape
            moved = tuple(
                Piece(piece.hf_name, piece.src, ((piece.dst[0][0] + rows, piece.dst[0][1] + rows), piece.dst[1]))
                for piece in below.pieces
            )
            shape = (rows + below.shape[0], columns)
            yield name.replace(queries, fused), StoredTensor(shape, stored.dtype, (*stored.pieces, *moved))
        elif keys not in name:
            yield name, stored


def _apart(layout: Layout, *, adds_bias: bool) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors with gate and up rows of experts apart.

    Args:
        layout: Layout with [gate; up] of each expert.
        adds_bias: False for ranks whose outputs are added to those of one that adds the experts' last bias: it is zero.
    """
    for name, stored in layout.items():
        if name.endswith((".experts.w13_weight", ".experts.w13_bias")):
            each = stored.shape[0] // len(stored.pieces)  # rows of one projection of one expert
            for number, end in enumerate(ALTERNATING):
                pieces = []
                for index, piece in enumerate(stored.pieces[number::2]):
                    rows = (index * each, (index + 1) * each)
                    pieces.append(Piece(piece.hf_name, piece.src, (rows, *piece.dst[1:])))
                shape = (stored.shape[0] // 2, *stored.shape[1:])
                yield f"{name}{end}", StoredTensor(shape, stored.dtype, tuple(pieces))
        elif name.endswith(".experts.w2_bias") and not adds_bias:
            yield name, StoredTensor(stored.shape, stored.dtype, (), (full_region(stored.shape),))
        else:
            yield name, stored


def _name(spec: ParamSpec, layer: int | None, renamed: Sequence[tuple[str, str]]) -> str:
    """Returns vLLM's name of a row: the Hugging Face name, or that of the fused tensor."""
    name = spec.hf[0] if layer is None else spec.hf[0].format(layer=layer, expert=0)
    if spec.kind.is_expert:
        return f"{name.partition('.experts.')[0]}.experts.{EXPERTS[spec.kind]}_{name.rpartition('.')[2]}"
    for first, fused in FUSED:
        if spec.kind in (ShardKind.QKV, ShardKind.GATE_UP):
            name = name.replace(f".{first}.", f".{fused}.")
    for theirs, own in renamed:
        name = name.replace(theirs, own)
    return name


def vllm_layouts(arch: ArchSpec, grid: ParallelLayout, dtype: str) -> dict[int, Layout]:
    """Returns rank -> `vllm_layout`; replicas share layout objects."""
    shared = [
        vllm_layout(arch, grid.rollout_tp, position, dtype, ep_size=grid.rollout_ep)
        for position in range(grid.rollout_tp)
    ]
    return {rank: shared[grid.rollout_tp_rank(rank)] for rank in grid.samplers}
