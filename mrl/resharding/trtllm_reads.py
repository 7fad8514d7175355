"""The part of each Hugging Face tensor that a rank of TensorRT-LLM's LLM API reads when it loads weights.

TensorRT-LLM expects full tensors and splits them itself, but each module reads only its own part: the rank's rows,
columns, heads or experts. So only these parts must be sent; the rest of a tensor may have any content, and other ranks'
experts may be missing.

Sources, NVIDIA/TensorRT-LLM: `_torch/modules/linear.py: load_weight_shard`, `_torch/modules/embedding.py`,
`_torch/models/checkpoints/hf/weight_mapper.py`, `_torch/modules/fused_moe/interface.py` and `quantization.py:
load_expert_weights_to_dst`. They split as in a checkpoint of built engines, with the embedding shared by the ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

from mrl.models.base import ArchSpec
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor
from mrl.resharding.regions import full_region, intersect, translate
from mrl.resharding.trtllm import TrtllmMapping, trtllm_layout

UNSHARDED_ONLY = frozenset({"phi3"})
"""Families whose `load_weights` does not support partial loading (`_torch/models/modeling_phi3.py`)."""

_EXPERT = re.compile(r"^(?P<module>.+\.experts)\.(?P<number>\d+)\.")

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class TrtllmModule:
    """The module of TensorRT-LLM's model that reads a tensor.

    Attributes:
        path: Name of the module in the model.
        expert: Index of the expert to which the tensor belongs; None: not an expert's tensor.
    """

    path: str
    expert: int | None = None


def reading_module(name: str) -> TrtllmModule:
    """Returns the module that reads a Hugging Face tensor (`HfWeightMapper.map_weights`)."""
    expert = _EXPERT.match(name)
    if expert is not None:
        return TrtllmModule(expert["module"], int(expert["number"]))
    parent, _, last = name.rpartition(".")[0].rpartition(".")
    return TrtllmModule(f"{parent}.{_FUSED.get(last, last)}".removeprefix("."))


def activation_scale_of(name: str) -> str | None:
    """Returns the name of the activation scale of attention's output projection; None for other matrices."""
    stem = name.removesuffix("o_proj.weight")
    return None if stem == name else f"{stem}o_proj.input_scale"


@cache
def read_layout(arch: ArchSpec, tp_size: int, ep_size: int, rank: int, dtype: str) -> Layout:
    """Returns the parts that a rank of a replica reads, in the order of the checkpoint: Hugging Face name -> part.

    Args:
        arch: The model.
        tp_size: Ranks of the replica.
        ep_size: Expert-parallel size inside the replica.
        rank: Position in the replica.
        dtype: Dtype of every tensor.

    Raises:
        UserError: The sizes do not divide the model's dimensions.
    """
    mapping = TrtllmMapping(tp_size, moe_ep_size=ep_size, use_parallel_embedding=True)
    needed: dict[str, set[Region]] = defaultdict(set)
    for stored in trtllm_layout(arch, mapping, rank, dtype).values():
        for piece in stored.pieces:
            needed[piece.hf_name].add(piece.src)
    full = hf_layout(arch, dtype)
    return {name: _concatenate(name, stored, sorted(needed[name])) for name, stored in full.items() if name in needed}


def cut_dim(part: StoredTensor, full: StoredTensor) -> int | None:
    """Returns the dimension along which `part` is shorter than the full tensor; None if it is complete."""
    extents = zip(part.shape, full.shape, strict=True)
    return next((dim for dim, (extent, whole_extent) in enumerate(extents) if extent < whole_extent), None)


def to_full_region(part: StoredTensor, region: Region) -> list[tuple[Region, Region]]:
    """Maps a region of a part into the full tensor: (region inside `region`, region of the full tensor) per piece."""
    found = []
    for piece in part.pieces:
        both = intersect(region, piece.dst)
        if both is not None:
            inside = translate(both, region, full_region([stop - start for start, stop in region]))
            found.append((inside, translate(both, piece.dst, piece.src)))
    return found


def _concatenate(name: str, full: StoredTensor, regions: list[Region]) -> StoredTensor:
    """Returns the regions of a tensor concatenated along the dimension in which they are split."""
    dim = next((dim for dim, extent in enumerate(full.shape) if regions[0][dim] != (0, extent)), 0)
    pieces, end = [], 0
    for region in regions:
        start, end = end, end + region[dim][1] - region[dim][0]
        dst = tuple((start, end) if axis == dim else span for axis, span in enumerate(region))
        pieces.append(Piece(name, region, dst))
    shape = tuple(end if axis == dim else extent for axis, extent in enumerate(full.shape))
    return full if shape == full.shape else replace(full, shape=shape, pieces=tuple(pieces))
