"""Memory of TensorRT-LLM's LLM API and of built engines, predicted from shapes and the meaning of their settings."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from mrl.algorithms.functional.sampling import truncates
from mrl.config.config import Config
from mrl.engines._memory_plan import (
    FP32_BYTES,
    EngineMemory,
    MemoryPlan,
    PlannedRun,
    bucket_bytes,
    generation_bytes,
    hidden_bytes,
    item_bytes,
    longest,
    model_bytes,
    native_weight_bytes,
    quantization_bytes,
    sequence_bytes,
    share_of_free,
    token_elements,
)
from mrl.engines.trtllm.engine_dir import read_engine_folder
from mrl.engines.trtllm.kv_cache import kv_cache
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.fp8 import block_grids, fp8_layout, scale_tables
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.trtllm import TrtllmMapping, trtllm_layout
from mrl.resharding.trtllm_reads import UNSHARDED_ONLY, read_layout


class LlmMemoryPlan(MemoryPlan):
    """Memory of the LLM API, which is assumed to shard the model like the native engine: every matrix and embedding."""

    discards_weights = "TensorRT-LLM 1.3"
    has_paged_cache = True

    def weight_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the size of the engine's weights on the fullest rank of a replica, bytes."""
        dtype = config.rollout.dtype or config.model.dtype
        return native_weight_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)[0]

    def arriving_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the most bytes that a weight sync sends to a rank: what its loader reads."""
        dtype = config.rollout.dtype or config.model.dtype
        return _read_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)

    def layouts(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[int, Layout]:
        """Returns rank -> layout of the tensors that its loader reads, without FP8 scales."""
        dtype, grids = config.rollout.dtype or config.model.dtype, block_grids(arch, config.rollout.quantization)
        tp, ep = grid.rollout_tp, grid.rollout_ep
        read = [fp8_layout(read_layout(arch, tp, ep, rank, dtype), grids) for rank in range(grid.rollout_size)]
        return {rank: read[grid.rollout_rank(rank)] for rank in grid.samplers}

    def cache_item_bytes(self, config: Config) -> float:
        """Returns the bytes of one element of the KV cache, which can be FP8."""
        return kv_cache(config.rollout, item_bytes(config)).item_bytes

    def memory(self, run: PlannedRun) -> EngineMemory:
        """Returns the memory of TensorRT-LLM's LLM API, whose weights sleep in host memory.

        Its cache is a fixed fraction of the memory that was free at the start. TensorRT-LLM first subtracts the peak
        of a trial pass; that is ignored here, so the cache is overestimated.
        """
        config, arch, grid, rollout = run.config, run.arch, run.grid, run.config.rollout
        size, elements = item_bytes(config), token_elements(arch, grid.rollout_tp)
        sizing = kv_cache(rollout, size)
        row_bytes = sizing.row_bytes(elements, longest(config))
        rows = min(rollout.max_num_seqs, run.num_samples)
        most = rows * row_bytes if run.device.capacity is None else share_of_free(run, run.weights + run.actor)
        cache = sizing.bounded(most, elements)
        rows = min(rows if run.device.capacity is None else rollout.max_num_seqs, cache // row_bytes)
        held = {"TensorRT-LLM's own": run.device.engine_allowance}
        part = {"engine's weights": run.weights}
        return EngineMemory(
            held=held if rollout.free_cache_engine else held | part,
            awake=part if rollout.free_cache_engine else {},
            refit=_staged(config, arch, grid),
            cache=max(cache, row_bytes),
            rows=rows,
            rollout=generation_bytes(run, size, rows),
            host=run.weights if rollout.free_cache_engine else 0,
        )


class BuiltMemoryPlan(MemoryPlan):
    """Memory of built TensorRT engines."""

    def weight_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the weights of the fullest rank, bytes."""
        return _built_bytes(arch, mapping_of(config), config.rollout.dtype or config.model.dtype)

    def layouts(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[int, Layout]:
        """Returns rank -> layout of the tensors of its engine."""
        dtype = config.rollout.dtype or config.model.dtype
        shared = [trtllm_layout(arch, mapping_of(config), rank, dtype) for rank in range(grid.rollout_size)]
        return {rank: shared[grid.rollout_rank(rank)] for rank in grid.samplers}

    def memory(self, run: PlannedRun) -> EngineMemory:
        """Returns the memory of built TensorRT engines: a weight sync needs a second copy; only the cache is freed."""
        config, arch, grid, rollout = run.config, run.arch, run.grid, run.config.rollout
        size = item_bytes(config)
        cut = truncates(rollout.top_k, rollout.top_p, rollout.min_p)
        row_bytes = sequence_bytes(
            arch, longest(config), grid.rollout_tp, size, layers=arch.num_layers // grid.rollout_pp
        )
        if cut:  # logits of every step, twice while they are being stacked
            row_bytes += 2 * FP32_BYTES * rollout.response_length * arch.vocab_size
        rows = min(
            rollout.max_num_seqs, max(1, rollout.max_num_batched_tokens // rollout.prompt_length), run.num_samples
        )
        work = hidden_bytes(run, size, rollout.max_num_batched_tokens)
        if run.device.capacity is not None:
            rows = min(rows, share_of_free(run, run.weights + run.actor + work) // row_bytes)
        return EngineMemory(
            held={
                "engine's weights": run.weights,
                "TensorRT's activations": work,
                "TensorRT-LLM's own": run.device.engine_allowance,
            },
            refit={"second copy of the weights": run.weights},
            cache=max(1, rows) * row_bytes,
            rows=rows,
        )


def _staged(config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[str, int]:
    """Returns the staging of a weight sync into the LLM API: a bucket of full tensors, and as much being assembled."""
    dtype = config.rollout.dtype or config.model.dtype
    tp, ep, quantization = grid.rollout_tp, grid.rollout_ep, config.rollout.quantization
    unsharded = full_bytes(arch, tp, ep, dtype, quantization)
    if arch.family in UNSHARDED_ONLY:
        return {"whole model of a refit": unsharded}
    largest = max(arch.vocab_size, arch.intermediate_size) * arch.hidden_size * ITEM_BYTES[dtype]
    staged = {"whole tensors of a refit": min(unsharded, 2 * (bucket_bytes(config) + largest))}
    return staged | quantization_bytes(config, arch, grid)


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

    def layout_of(one: ArchSpec) -> Layout:
        full, grids = hf_layout(one, dtype), block_grids(one, quantization)
        unsharded = fp8_layout({name: full[name] for name in read_layout(one, tp, ep, 0, dtype)}, grids)
        return {**unsharded, **scale_tables(unsharded, grids)}

    return model_bytes(arch, layout_of)


@functools.cache
def _read_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Returns what the LLM API reads on the first rank of a replica, with complete scale tables; no rank reads more."""

    def layout_of(one: ArchSpec) -> Layout:
        full, grids = hf_layout(one, dtype), block_grids(one, quantization)
        read = fp8_layout(read_layout(one, tp, ep, 0, dtype), grids)
        return {**read, **scale_tables({name: full[name] for name in read}, grids)}

    return model_bytes(arch, layout_of)
