"""Layout of one rank of a TensorRT-LLM 1.x checkpoint: tensor, expert and pipeline parallel.

`attention.qkv` is the rank's query heads, then its key heads, then its value heads. A dense MLP keeps its branches
separate: `mlp.fc` is the activated one, Hugging Face's gate_proj, and `mlp.gate` is up_proj. Experts and the shared
expert, a part of `mlp`, are [up; gate], the opposite of Megatron's order. The families' tables have the names; layers
are counted from the first one of the pipeline stage.

A built engine may store weights differently. Two properties of `trtllm-build` are known from its sources and have not
been observed in a run: it fuses the MLP of a dense layer (`mlp.fused_fc` is [mlp.gate; mlp.fc], unless `use_fused_mlp`
is off), and with refit on it may offer the rotary tables, which are not in a checkpoint and keep their built values.

Sources, NVIDIA/TensorRT-LLM: `mapping.py`, `models/llama/convert.py`, `models/qwen/model.py`, `models/convert_utils.py:
dup_kv_weight`, `layers/moe.py`, `layers/embedding.py`. Derived from the sources; TensorRT-LLM has loaded none of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from mrl.errors import UserError
from mrl.models.base import ArchSpec, MoeSpec, ParamSpec, PipelineStage, ShardKind, moe_of
from mrl.resharding.layout import Layout, StoredTensor
from mrl.resharding.native import by_projection
from mrl.resharding.shards import (
    ExpertShard,
    Part,
    Segment,
    TensorShard,
    check_divides,
    check_experts_divide,
    concat_rows,
    equal_parts,
    layers_of,
    param_specs,
    parts_of,
    shard_row,
    stack,
)

HEAD = "lm_head.weight"
"""Output head; with tied embeddings a padded copy of them."""

FUSED = ".mlp.fused_fc.weight"
"""[up_proj; gate_proj] of a dense layer, as `fuse_gate_mlp` of TensorRT-LLM's models/modeling_utils.py makes it."""

UNFUSED = (".mlp.gate.weight", ".mlp.fc.weight")
"""Suffixes of the checkpoint's tensors that `FUSED` consists of, in order."""

_SHARED_EXPERT_OUTSIDE_MLP = re.compile(r"^(transformer\.layers\.\d+\.)(shared_expert)")

CONSTANTS = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
"""Last part of the names of tables that are computed from config.json alone."""


@dataclass(frozen=True)
class TrtllmMapping:
    """Parallel layout of a checkpoint; the tensor-parallel rank changes fastest.

    Attributes:
        tp_size: Ranks that share a layer.
        pp_size: Pipeline stages; the first `num_layers % pp_size` of them have one layer more.
        moe_tp_size: Ranks that share an expert; 0: derived from `tp_size` and `moe_ep_size`.
        moe_ep_size: Expert-parallel size; 0: derived from `tp_size` and `moe_tp_size`, or 1.
        use_parallel_embedding: True if the tensor-parallel ranks share the embedding; otherwise each has all of it.
        embedding_sharding_dim: Split dimension of the embedding. 0: vocabulary, with padding; 1: hidden dimension.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = 0
    moe_ep_size: int = 0
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0

    def __post_init__(self) -> None:
        """Derives the sizes of the experts.

        Raises:
            UserError: A size is not a positive integer, or the sizes do not fit together.
        """
        for name in ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size"):
            size, least = getattr(self, name), 0 if name.startswith("moe") else 1
            if type(size) is not int or size < least:
                raise UserError(f"{name} is {size!r}; expected an integer of at least {least}.")
        if self.embedding_sharding_dim not in (0, 1):
            raise UserError(f"embedding_sharding_dim is {self.embedding_sharding_dim!r}; expected 0 or 1.")
        moe_ep = self.moe_ep_size or self.tp_size // max(1, self.moe_tp_size or self.tp_size)
        moe_tp = self.moe_tp_size or self.tp_size // max(1, moe_ep)
        if moe_tp * moe_ep != self.tp_size:
            raise UserError(
                f"moe_tp_size x moe_ep_size = {self.moe_tp_size or 'rest'} x {self.moe_ep_size or 'rest'} is not "
                f"tp_size={self.tp_size}. TensorRT-LLM distributes the experts over the tensor-parallel ranks."
            )
        object.__setattr__(self, "moe_ep_size", moe_ep)
        object.__setattr__(self, "moe_tp_size", moe_tp)

    @property
    def world_size(self) -> int:
        """Number of ranks, and of files."""
        return self.tp_size * self.pp_size

    def layers(self, arch: ArchSpec, pp_rank: int) -> range:
        """Returns the layers of a pipeline stage."""
        each, more = divmod(arch.num_layers, self.pp_size)
        start = pp_rank * each + min(pp_rank, more)
        return range(start, start + each + (pp_rank < more))

    def check(self, arch: ArchSpec) -> None:
        """Raises UserError if a size does not divide the model's dimensions; the message names the size."""
        shard = TensorShard(self.tp_size, 0, "tp_size")
        check_divides(arch, shard)
        if arch.moe is not None:
            check_experts_divide(arch.moe, self.experts(0))
        if self.pp_size > arch.num_layers:
            raise UserError(
                f"pp_size={self.pp_size} leaves stages without any of the model's {arch.num_layers} layers."
            )
        if self.use_parallel_embedding and self.embedding_sharding_dim == 1 and arch.hidden_size % self.tp_size:
            raise UserError(
                f"tp_size={self.tp_size} does not divide the model's hidden_size ({arch.hidden_size}), as "
                "use_parallel_embedding with embedding_sharding_dim=1 needs. Use embedding_sharding_dim=0."
            )

    def experts(self, tp_rank: int) -> ExpertShard:
        """Returns a rank's experts and its part of each; neighbours get different experts first."""
        cut_rank, spread_rank = divmod(tp_rank, self.moe_ep_size)
        return ExpertShard(
            TensorShard(self.moe_ep_size, spread_rank, "moe_ep_size"),
            TensorShard(self.moe_tp_size, cut_rank, "moe_tp_size"),
        )


def trtllm_layout(arch: ArchSpec, mapping: TrtllmMapping, rank: int, dtype: str) -> Layout:
    """Returns the layout of `rank{rank}.safetensors`: name -> tensor, fp32 routers first.

    Args:
        arch: The model.
        mapping: Parallel layout.
        rank: pp_rank x tp_size + tp_rank.
        dtype: Dtype of every tensor except the routers, which TensorRT-LLM requires in fp32.

    Raises:
        UserError: TensorRT-LLM has no such tensor, or the sizes do not divide the model's dimensions.
    """
    mapping.check(arch)
    pp_rank, tp_rank = divmod(rank, mapping.tp_size)
    shard = TensorShard(mapping.tp_size, tp_rank, "tp_size")
    layout: Layout = {}
    for spec, local, layer in _stage_rows(arch, mapping, pp_rank):
        for name, stored in zip(
            spec.trtllm, _stored_tensors(spec, arch, mapping, shard, layer, spec.trtllm_dtype or dtype), strict=True
        ):
            layout[name if layer is None else name.format(layer=local)] = stored
    if arch.tie_word_embeddings and pp_rank == mapping.pp_size - 1:
        embedding = next(spec for spec in param_specs(arch) if spec.kind is ShardKind.VOCAB)
        layout[HEAD] = shard_row(embedding, arch, shard, layer=None, dtype=dtype, qkv_rows=by_projection)
    return dict(sorted(layout.items(), key=lambda item: item[1].dtype != "float32"))


def parts_in_engine(name: str) -> tuple[str, ...]:
    """Returns the checkpoint's tensors that a built engine's weight consists of, in order; () for a constant table."""
    if name.rpartition(".")[2] in CONSTANTS:
        return ()
    return tuple(name.removesuffix(FUSED) + suffix for suffix in UNFUSED) if name.endswith(FUSED) else (name,)


def current_name(name: str) -> str:
    """Returns a tensor's or module's name in 1.x; earlier versions had qwen2_moe's shared expert outside `mlp`."""
    return _SHARED_EXPERT_OUTSIDE_MLP.sub(r"\1mlp.\2", name)


def is_shared_head(name: str, layout: Layout, used: Collection[str]) -> bool:
    """Returns whether a tensor is the head and equals one of `used`: an engine may store a tied embedding once."""
    if name != HEAD:
        return False
    copied = {piece.hf_name for piece in layout[HEAD].pieces}
    return any({piece.hf_name for piece in layout[other].pieces} == copied for other in used if other in layout)


def linear_modules(arch: ArchSpec, mapping: TrtllmMapping, rank: int) -> dict[str, str]:
    """Returns weight name -> module, with the model's layer index, for the weights that TensorRT-LLM may quantize.

    These are the linear layers except the router, the shared expert's gate and the head, which TensorRT-LLM excludes.
    """
    found = {}
    for spec, local, layer in _stage_rows(arch, mapping, rank // mapping.tp_size):
        if spec.kind in (ShardKind.REPLICATED, ShardKind.VOCAB):
            continue
        for name in spec.trtllm:
            if name.endswith(".weight"):
                found[name.format(layer=local)] = name.removesuffix(".weight").format(layer=layer)
    return found


def _stage_rows(arch: ArchSpec, mapping: TrtllmMapping, pp_rank: int) -> list[tuple[ParamSpec, int, int | None]]:
    """Returns (row, layer index in the stage, layer index in the model) of every tensor of a stage."""
    found: list[tuple[ParamSpec, int, int | None]] = []
    for spec in param_specs(arch):
        if not spec.trtllm:
            raise UserError(f"TensorRT-LLM has no tensor for '{spec.hf[0]}' of a {arch.family} model.")
        if spec.place is PipelineStage.LAYER:
            present = layers_of(spec, arch)
            found += [
                (spec, local, layer) for local, layer in enumerate(mapping.layers(arch, pp_rank)) if layer in present
            ]
        elif pp_rank == (0 if spec.place is PipelineStage.FIRST else mapping.pp_size - 1):
            found.append((spec, 0, None))
    return found


def _stored_tensors(
    spec: ParamSpec, arch: ArchSpec, mapping: TrtllmMapping, shard: TensorShard, layer: int | None, dtype: str
) -> list[StoredTensor]:
    """Returns the tensors that a rank stores for a row, one for each of its names."""
    if spec.kind.is_expert and layer is not None:
        return [_expert_tensor(spec, arch, moe_of(arch), mapping.experts(shard.rank), layer, dtype)]
    if spec.kind is ShardKind.GATE_UP:
        parts = parts_of(spec, arch)
        groups = [parts[::-1]] if len(spec.trtllm) == 1 else [[part] for part in parts]
        return [_column_parallel(group, shard, layer, dtype) for group in groups]
    if spec.kind is ShardKind.VOCAB and spec.place is PipelineStage.FIRST:
        return [_embedding_tensor(spec, arch, mapping, shard, dtype)]
    return [shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=by_projection)]


def _column_parallel(parts: list[Part], shard: TensorShard, layer: int | None, dtype: str) -> StoredTensor:
    return stack(parts, equal_parts(len(parts), parts[0].shape[0], shard), layer=layer, dim=0, dtype=dtype)


def _embedding_tensor(
    spec: ParamSpec, arch: ArchSpec, mapping: TrtllmMapping, shard: TensorShard, dtype: str
) -> StoredTensor:
    if mapping.use_parallel_embedding and mapping.embedding_sharding_dim == 0:
        return shard_row(spec, arch, shard, layer=None, dtype=dtype, qkv_rows=by_projection)
    parts = parts_of(spec, arch)
    cut = shard if mapping.use_parallel_embedding else TensorShard(1, 0, "tp_size")
    segments: list[Segment] = equal_parts(1, arch.hidden_size, cut)
    return stack(parts, segments, layer=None, dim=1, dtype=dtype)


def _expert_tensor(
    spec: ParamSpec, arch: ArchSpec, moe: MoeSpec, place: ExpertShard, layer: int, dtype: str
) -> StoredTensor:
    """Returns the rank's experts as one tensor, [up; gate] of each; it has three dimensions in the file."""
    parts = parts_of(spec, arch)[::-1]
    dim = 1 if spec.kind is ShardKind.EXPERT_DOWN else 0
    segments = equal_parts(len(parts), parts[0].shape[dim], place.etp)
    experts = [
        stack(parts, segments, layer=layer, expert=expert, dim=dim, dtype=dtype) for expert in place.experts(moe)
    ]
    return replace(concat_rows(experts), view=(len(experts), *experts[0].shape))
