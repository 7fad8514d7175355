"""What a run's engine stores on its ranks, and what a refit brings it: layouts, and bytes by shapes.

Owns which layout each engine has. What engines hold besides is `engine_memory.py`'s.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from mrl.config.config import Config
from mrl.engines.trtllm.engine_dir import read_engine_folder
from mrl.models.base import ArchSpec
from mrl.parallel_layout import Grid
from mrl.resharding.copy_op import ITEM_BYTES, num_bytes
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.fp8 import grids_of, in_fp8, scale_tables
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.layout_index import distinct
from mrl.resharding.native import native_layout, native_layouts
from mrl.resharding.trtllm import TrtllmMapping, trtllm_layout
from mrl.resharding.trtllm_reads import read_layout
from mrl.resharding.vllm import vllm_layout, vllm_layouts


def weight_bytes(config: Config, arch: ArchSpec, grid: Grid) -> int:
    """The engine's weights on the fullest rank of a replica.

    TensorRT-LLM's LLM API is counted as if it cut the model like the native engine: every matrix, embedding and head.
    """
    dtype = config.rollout.dtype or config.model.dtype
    if config.rollout.name == "trtllm_engine":
        return _built_bytes(arch, mapping_of(config), dtype)
    if config.rollout.name == "vllm":
        return _vllm_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)
    return native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)[0]


def arriving_bytes(config: Config, arch: ArchSpec, grid: Grid) -> int:
    """What a refit brings to a rank's engine at most."""
    if config.rollout.name == "trtllm":
        dtype = config.rollout.dtype or config.model.dtype
        return _read_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)
    return weight_bytes(config, arch, grid)


def engine_layouts(config: Config, arch: ArchSpec, grid: Grid) -> dict[int, Layout]:
    """Rank -> what its engine wants of other ranks in a refit, so no scales; equal ones are one object."""
    dtype, grids = config.rollout.dtype or config.model.dtype, grids_of(arch, config.rollout.quantization)
    if config.rollout.name == "trtllm":
        tp, ep = grid.rollout_tp, grid.rollout_ep
        read = [in_fp8(read_layout(arch, tp, ep, rank, dtype), grids) for rank in range(grid.rollout_size)]
        return {rank: read[grid.rollout_rank(rank)] for rank in grid.samplers}
    if config.rollout.name == "trtllm_engine":
        shared = [trtllm_layout(arch, mapping_of(config), rank, dtype) for rank in range(grid.rollout_size)]
        return {rank: shared[grid.rollout_rank(rank)] for rank in grid.samplers}
    layouts = (vllm_layouts if config.rollout.name == "vllm" else native_layouts)(arch, grid, dtype)
    in_turn = {id(layout): in_fp8(layout, grids) for layout in distinct(layouts)}
    return {rank: in_turn[id(layout)] for rank, layout in layouts.items()}


def packed_elements(arch: ArchSpec, grid: Grid) -> int:
    """Elements of the matrices that the native engine multiplies with, on a rank."""
    return _elements(arch, grid.rollout_tp, grid.rollout_ep)[0]


def mapping_of(config: Config) -> TrtllmMapping:
    """Of the engines in `rollout.engine_dir`, which preflight has compared with the run."""
    return read_engine_folder(config.rollout.engine_dir or "").config.mapping


@functools.cache
def _built_bytes(arch: ArchSpec, mapping: TrtllmMapping, dtype: str) -> int:
    """Weights of the fullest rank, from one layer of each stage."""
    few, most = replace(arch, num_layers=mapping.pp_size), 0
    for rank in range(mapping.world_size):
        layers = len(mapping.layers(arch, rank // mapping.tp_size))
        sizes = (
            math.prod(stored.shape) * ITEM_BYTES[stored.dtype] * (layers if ".layers." in name else 1)
            for name, stored in trtllm_layout(few, mapping, rank, dtype).items()
        )
        most = max(most, sum(sizes))
    return most


@functools.cache
def whole_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """All tensors of which the LLM API reads a part on a rank, whole, with their scales."""
    few = replace(arch, num_layers=1)
    full, grids = hf_layout(few, dtype), grids_of(few, quantization)
    whole = in_fp8({name: full[name] for name in read_layout(few, tp, ep, 0, dtype)}, grids)
    return _all_bytes({**whole, **scale_tables(whole, grids)}, arch)


@functools.cache
def _read_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """What the LLM API reads on the first rank of a replica, and whole tables of scales; no other reads more."""
    few = replace(arch, num_layers=1)
    full, grids = hf_layout(few, dtype), grids_of(few, quantization)
    read = in_fp8(read_layout(few, tp, ep, 0, dtype), grids)
    return _all_bytes({**read, **scale_tables({name: full[name] for name in read}, grids)}, arch)


def _all_bytes(layout: Layout, arch: ArchSpec) -> int:
    """Of a model's tensors, from those of one layer."""
    return sum(num_bytes(stored) * (arch.num_layers if ".layers." in name else 1) for name, stored in layout.items())


@functools.cache
def _vllm_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Of the first rank of a replica, the others have as many."""
    few = replace(arch, num_layers=1)
    return _all_bytes(vllm_layout(few, tp, 0, dtype, ep_size=ep, quantization=quantization), arch)


@functools.cache
def _elements(arch: ArchSpec, tp: int, ep: int) -> tuple[int, int]:
    """(elements of matrices that the native engine multiplies with, other elements) of a rank."""
    layout = native_layout(replace(arch, num_layers=1), tp, 0, "bfloat16", ep_size=ep)
    matrices, others = 0, 0
    for name, stored in layout.items():
        count = math.prod(stored.shape) * (arch.num_layers if name.startswith("layers.") else 1)
        if len(stored.shape) == 2 and (name != "embed" or arch.tie_word_embeddings):
            matrices += count
        else:
            others += count
    return matrices, others


@functools.cache
def native_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> tuple[int, int]:
    """(bytes of the native engine's tensors on a rank, scales included; those in FP8).

    Ranks differ in the blocks that they touch, so in their scales alone.
    """
    few = replace(arch, num_layers=1)
    grids = grids_of(few, quantization)
    found = []
    for position in range(tp if grids else 1):
        layout = in_fp8(native_layout(few, tp, position, dtype, ep_size=ep), grids)
        sizes = [
            (num_bytes(stored) * (arch.num_layers if name.startswith("layers.") else 1), stored.dtype)
            for name, stored in {**layout, **scale_tables(layout, grids)}.items()
        ]
        found.append((sum(size for size, _ in sizes), sum(size for size, kind in sizes if kind == FP8)))
    return max(found)
