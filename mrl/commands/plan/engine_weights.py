"""Layouts and sizes of an engine's weights on its ranks, and of the weights that a weight sync sends to it."""

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
    """Returns the size of the engine's weights on the fullest rank of a replica, bytes.

    TensorRT-LLM's LLM API is assumed to shard the model like the native engine: every matrix, embedding and head.
    """
    dtype = config.rollout.dtype or config.model.dtype
    if config.rollout.name == "trtllm_engine":
        return _built_bytes(arch, mapping_of(config), dtype)
    if config.rollout.name == "vllm":
        return _vllm_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)
    return native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)[0]


def arriving_bytes(config: Config, arch: ArchSpec, grid: Grid) -> int:
    """Returns the most bytes that a weight sync sends to a rank's engine."""
    if config.rollout.name == "trtllm":
        dtype = config.rollout.dtype or config.model.dtype
        return _read_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)
    return weight_bytes(config, arch, grid)


def engine_layouts(config: Config, arch: ArchSpec, grid: Grid) -> dict[int, Layout]:
    """Returns rank -> layout of the tensors that its engine receives in a weight sync, without FP8 scales.

    Equal layouts are one object.
    """
    dtype, grids = config.rollout.dtype or config.model.dtype, grids_of(arch, config.rollout.quantization)
    if config.rollout.name == "trtllm":
        tp, ep = grid.rollout_tp, grid.rollout_ep
        read = [in_fp8(read_layout(arch, tp, ep, rank, dtype), grids) for rank in range(grid.rollout_size)]
        return {rank: read[grid.rollout_rank(rank)] for rank in grid.samplers}
    if config.rollout.name == "trtllm_engine":
        shared = [trtllm_layout(arch, mapping_of(config), rank, dtype) for rank in range(grid.rollout_size)]
        return {rank: shared[grid.rollout_rank(rank)] for rank in grid.samplers}
    layouts = (vllm_layouts if config.rollout.name == "vllm" else native_layouts)(arch, grid, dtype)
    converted = {id(layout): in_fp8(layout, grids) for layout in distinct(layouts)}
    return {rank: converted[id(layout)] for rank, layout in layouts.items()}


def packed_elements(arch: ArchSpec, grid: Grid) -> int:
    """Returns the number of elements of the native engine's matrices on a rank."""
    return _elements(arch, grid.rollout_tp, grid.rollout_ep)[0]


def mapping_of(config: Config) -> TrtllmMapping:
    """Returns the parallel mapping of the built engines in `rollout.engine_dir`; validation has checked it."""
    return read_engine_folder(config.rollout.engine_dir or "").config.mapping


@functools.cache
def _built_bytes(arch: ArchSpec, mapping: TrtllmMapping, dtype: str) -> int:
    """Returns the weights of the fullest rank of built engines, from one layer of each stage."""
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
def full_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Returns the size of the unsharded tensors of which the LLM API reads a part on a rank, with their FP8 scales."""
    few = replace(arch, num_layers=1)
    full, grids = hf_layout(few, dtype), grids_of(few, quantization)
    unsharded = in_fp8({name: full[name] for name in read_layout(few, tp, ep, 0, dtype)}, grids)
    return _all_bytes({**unsharded, **scale_tables(unsharded, grids)}, arch)


@functools.cache
def _read_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Returns what the LLM API reads on the first rank of a replica, with complete scale tables; no rank reads more."""
    few = replace(arch, num_layers=1)
    full, grids = hf_layout(few, dtype), grids_of(few, quantization)
    read = in_fp8(read_layout(few, tp, ep, 0, dtype), grids)
    return _all_bytes({**read, **scale_tables({name: full[name] for name in read}, grids)}, arch)


def _all_bytes(layout: Layout, arch: ArchSpec) -> int:
    """Returns the size of all layers' tensors, from a layout with one layer."""
    return sum(num_bytes(stored) * (arch.num_layers if ".layers." in name else 1) for name, stored in layout.items())


@functools.cache
def _vllm_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Returns the size of vLLM's weights on a rank; all ranks of a replica have equally many."""
    few = replace(arch, num_layers=1)
    return _all_bytes(vllm_layout(few, tp, 0, dtype, ep_size=ep, quantization=quantization), arch)


@functools.cache
def _elements(arch: ArchSpec, tp: int, ep: int) -> tuple[int, int]:
    """Returns (elements of the native engine's matrices, other elements) on a rank."""
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
    """Returns (bytes of the native engine's tensors on a rank, with scales; those of them in FP8).

    Ranks differ only in the number of FP8 blocks that their shards touch, and so of scales; this is the largest.
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
