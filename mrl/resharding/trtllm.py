"""The layout of one rank of a TensorRT-LLM 1.x checkpoint: tensor, expert and pipeline parallel.

Owns its mapping of ranks and its order of fused rows. `attention.qkv` holds the rank's query heads, then its key heads,
then its value heads; a dense MLP keeps its branches apart (`mlp.fc` is the activated one, Hugging Face's gate_proj, and
`mlp.gate` is up_proj); experts and the shared expert, a part of `mlp`, are [up; gate], the opposite of Megatron's
order. Names stand in the families' tables; layers are counted from the first one of the pipeline stage.

A built engine may store otherwise. Two things of `trtllm-build` were read in its sources and have not been seen
running: it fuses the MLP of a dense layer (`mlp.fused_fc` is [mlp.gate; mlp.fc], unless `use_fused_mlp` is off), and
with refit on it may offer the rotary tables, which are no weights of a checkpoint and stay as they were built.

Sources, NVIDIA/TensorRT-LLM: `mapping.py`, `models/llama/convert.py`, `models/qwen/model.py`, `models/convert_utils.py:
dup_kv_weight`, `layers/moe.py`, `layers/embedding.py`. They were read; nothing of this has been loaded by TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from mrl.errors import UserError
from mrl.models.base import ArchSpec, Kind, MoeSpec, ParamSpec, Place, moe_of
from mrl.resharding.layout import Layout, StoredTensor
from mrl.resharding.native import by_projection
from mrl.resharding.shards import (
    ExpertShard,
    Part,
    Segment,
    TensorShard,
    check_divides,
    check_experts_divide,
    equal_parts,
    parts_of,
    pile,
    shard_row,
    stack,
    table,
)

HEAD = "lm_head.weight"
"""With tied embeddings a padded copy of them."""

FUSED = ".mlp.fused_fc.weight"
"""[up_proj; gate_proj] of a dense layer, as `fuse_gate_mlp` of TensorRT-LLM's models/modeling_utils.py makes it."""

UNFUSED = (".mlp.gate.weight", ".mlp.fc.weight")

BESIDE = re.compile(r"^(transformer\.layers\.\d+\.)(shared_expert)")

CONSTANTS = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
"""Last part of the names of tables that follow from config.json alone."""


@dataclass(frozen=True)
class TrtllmMapping:
    """How a checkpoint is spread over ranks; the tensor-parallel rank changes fastest.

    Attributes:
        tp_size: Ranks that share a layer.
        pp_size: Pipeline stages; the first `num_layers % pp_size` of them hold one layer more.
        moe_tp_size: Ranks that share an expert; 0: what `tp_size` and `moe_ep_size` leave.
        moe_ep_size: Parts in which the experts are spread; 0: what `tp_size` and `moe_tp_size` leave, or 1.
        use_parallel_embedding: The tensor-parallel ranks share the embedding; otherwise each of them has it whole.
        embedding_sharding_dim: 0: cut along the vocabulary, with padding; 1: along the hidden dimension.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = 0
    moe_ep_size: int = 0
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0

    def __post_init__(self) -> None:
        """Fills in the sizes of the experts.

        Raises:
            UserError: A size is not a whole number above 0, or the sizes do not fit together.
        """
        for name in ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size"):
            size, least = getattr(self, name), 0 if name.startswith("moe") else 1
            if type(size) is not int or size < least:
                raise UserError(f"{name} is {size!r}; expected a whole number of at least {least}.")
        if self.embedding_sharding_dim not in (0, 1):
            raise UserError(f"embedding_sharding_dim is {self.embedding_sharding_dim!r}; expected 0 or 1.")
        moe_ep = self.moe_ep_size or self.tp_size // max(1, self.moe_tp_size or self.tp_size)
        moe_tp = self.moe_tp_size or self.tp_size // max(1, moe_ep)
        if moe_tp * moe_ep != self.tp_size:
            raise UserError(
                f"moe_tp_size x moe_ep_size = {self.moe_tp_size or 'rest'} x {self.moe_ep_size or 'rest'} does not "
                f"make tp_size={self.tp_size}. TensorRT-LLM spreads the experts over the tensor-parallel ranks."
            )
        object.__setattr__(self, "moe_ep_size", moe_ep)
        object.__setattr__(self, "moe_tp_size", moe_tp)

    @property
    def world_size(self) -> int:
        """Ranks, and files."""
        return self.tp_size * self.pp_size

    def layers(self, arch: ArchSpec, pp_rank: int) -> range:
        """The layers of a pipeline stage."""
        each, more = divmod(arch.num_layers, self.pp_size)
        start = pp_rank * each + min(pp_rank, more)
        return range(start, start + each + (pp_rank < more))

    def check(self, arch: ArchSpec) -> None:
        """Raises UserError where a model cannot be spread so; the message names the size."""
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
        """A rank's experts and its part of each: the experts are spread over neighbours first."""
        cut_rank, spread_rank = divmod(tp_rank, self.moe_ep_size)
        return ExpertShard(
            TensorShard(self.moe_ep_size, spread_rank, "moe_ep_size"),
            TensorShard(self.moe_tp_size, cut_rank, "moe_tp_size"),
        )


def trtllm_layout(arch: ArchSpec, mapping: TrtllmMapping, rank: int, dtype: str) -> Layout:
    """What is in `rank{rank}.safetensors`: name -> tensor, fp32 routers first.

    Args:
        arch: The model.
        mapping: The ranks.
        rank: pp_rank x tp_size + tp_rank.
        dtype: Of every tensor but the routers, which TensorRT-LLM wants in fp32.

    Raises:
        UserError: TensorRT-LLM has no such tensor, or the sizes do not divide what they split.
    """
    mapping.check(arch)
    pp_rank, tp_rank = divmod(rank, mapping.tp_size)
    shard = TensorShard(mapping.tp_size, tp_rank, "tp_size")
    layout: Layout = {}
    for spec, local, layer in _rows(arch, mapping, pp_rank):
        for name, stored in zip(
            spec.trtllm, _store(spec, arch, mapping, shard, layer, spec.trtllm_dtype or dtype), strict=True
        ):
            layout[name if layer is None else name.format(layer=local)] = stored
    if arch.tie_word_embeddings and pp_rank == mapping.pp_size - 1:
        embedding = next(spec for spec in table(arch) if spec.kind is Kind.VOCAB)
        layout[HEAD] = shard_row(embedding, arch, shard, layer=None, dtype=dtype, qkv_rows=by_projection)
    return dict(sorted(layout.items(), key=lambda item: item[1].dtype != "float32"))


def parts_in_engine(name: str) -> tuple[str, ...]:
    """The checkpoint's tensors that a built engine's weight is made of, in its order; () for a constant table."""
    if name.rpartition(".")[2] in CONSTANTS:
        return ()
    return tuple(name.removesuffix(FUSED) + suffix for suffix in UNFUSED) if name.endswith(FUSED) else (name,)


def current_name(name: str) -> str:
    """A tensor's or a module's name as 1.x spells it: before, qwen2_moe's shared expert stood beside `mlp`."""
    return BESIDE.sub(r"\1mlp.\2", name)


def is_shared_head(name: str, layout: Layout, used: Collection[str]) -> bool:
    """Whether a tensor is the head, and a copy of one of `used`: an engine may hold the tied embedding once."""
    if name != HEAD:
        return False
    copied = {piece.hf_name for piece in layout[HEAD].pieces}
    return any({piece.hf_name for piece in layout[other].pieces} == copied for other in used if other in layout)


def linear_modules(arch: ArchSpec, mapping: TrtllmMapping, rank: int) -> dict[str, str]:
    """Weights of a rank that TensorRT-LLM may quantise -> their module, its layer counted in the whole model.

    These are the linear layers without the router, the shared expert's gate and the head, which it excludes.
    """
    found = {}
    for spec, local, layer in _rows(arch, mapping, rank // mapping.tp_size):
        if spec.kind in (Kind.REPLICATED, Kind.VOCAB):
            continue
        for name in spec.trtllm:
            if name.endswith(".weight"):
                found[name.format(layer=local)] = name.removesuffix(".weight").format(layer=layer)
    return found


def _rows(arch: ArchSpec, mapping: TrtllmMapping, pp_rank: int) -> list[tuple[ParamSpec, int, int | None]]:
    """(row, layer counted in the stage, layer in the whole model) of every tensor of a stage."""
    found: list[tuple[ParamSpec, int, int | None]] = []
    for spec in table(arch):
        if not spec.trtllm:
            raise UserError(f"TensorRT-LLM has no tensor for '{spec.hf[0]}' of a {arch.family} model.")
        if spec.place is Place.LAYER:
            found += [(spec, local, layer) for local, layer in enumerate(mapping.layers(arch, pp_rank))]
        elif pp_rank == (0 if spec.place is Place.FIRST else mapping.pp_size - 1):
            found.append((spec, 0, None))
    return found


def _store(
    spec: ParamSpec, arch: ArchSpec, mapping: TrtllmMapping, shard: TensorShard, layer: int | None, dtype: str
) -> list[StoredTensor]:
    """What a rank stores of a row: one tensor for each of its names."""
    if spec.kind.is_expert and layer is not None:
        return [_experts(spec, arch, moe_of(arch), mapping.experts(shard.rank), layer, dtype)]
    if spec.kind is Kind.GATE_UP:
        parts = parts_of(spec, arch)
        groups = [parts[::-1]] if len(spec.trtllm) == 1 else [[part] for part in parts]
        return [_columns(group, shard, layer, dtype) for group in groups]
    if spec.kind is Kind.VOCAB and spec.place is Place.FIRST:
        return [_embedding(spec, arch, mapping, shard, dtype)]
    return [shard_row(spec, arch, shard, layer=layer, dtype=dtype, qkv_rows=by_projection)]


def _columns(parts: list[Part], shard: TensorShard, layer: int | None, dtype: str) -> StoredTensor:
    return stack(parts, equal_parts(len(parts), parts[0].shape[0], shard), layer=layer, dim=0, dtype=dtype)


def _embedding(spec: ParamSpec, arch: ArchSpec, mapping: TrtllmMapping, shard: TensorShard, dtype: str) -> StoredTensor:
    if mapping.use_parallel_embedding and mapping.embedding_sharding_dim == 0:
        return shard_row(spec, arch, shard, layer=None, dtype=dtype, qkv_rows=by_projection)
    parts = parts_of(spec, arch)
    cut = shard if mapping.use_parallel_embedding else TensorShard(1, 0, "tp_size")
    segments: list[Segment] = equal_parts(1, arch.hidden_size, cut)
    return stack(parts, segments, layer=None, dim=1, dtype=dtype)


def _experts(spec: ParamSpec, arch: ArchSpec, moe: MoeSpec, place: ExpertShard, layer: int, dtype: str) -> StoredTensor:
    """The rank's experts as one tensor, [up; gate] of each; in the file it has three dimensions."""
    parts = parts_of(spec, arch)[::-1]
    dim = 1 if spec.kind is Kind.EXPERT_DOWN else 0
    segments = equal_parts(len(parts), parts[0].shape[dim], place.cut)
    experts = [
        stack(parts, segments, layer=layer, expert=expert, dim=dim, dtype=dtype) for expert in place.experts(moe)
    ]
    return replace(pile(experts), view=(len(experts), *experts[0].shape))
