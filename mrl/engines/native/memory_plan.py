"""Memory of the native engine, counted as it allocates."""

from __future__ import annotations

import math

from mrl.config.config import Config
from mrl.engines._memory_plan import (
    FP8_WORK,
    FP32_BYTES,
    EngineMemory,
    MemoryPlan,
    PlannedRun,
    bucket_bytes,
    experts_work,
    generation_bytes,
    item_bytes,
    longest,
    matrix_elements,
    native_weight_bytes,
    quantized_layouts,
    sequence_bytes,
)
from mrl.engines.native.decode_state import routing_format
from mrl.engines.native.kv_cache import SLOT_MULTIPLE, ring_slots, state_shape
from mrl.engines.native.ngram_history import History
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.fp8_quantize import BAND_ELEMENTS
from mrl.resharding.layout import Layout
from mrl.resharding.native import native_layouts


class NativeMemoryPlan(MemoryPlan):
    """Memory of the native engine."""

    def weight_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the size of the engine's weights on the fullest rank of a replica, bytes."""
        dtype = config.rollout.dtype or config.model.dtype
        return native_weight_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)[0]

    def layouts(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[int, Layout]:
        """Returns rank -> layout of the tensors that its engine receives in a weight sync, without FP8 scales."""
        dtype = config.rollout.dtype or config.model.dtype
        return quantized_layouts(native_layouts(arch, grid, dtype), config, arch)

    def memory(self, run: PlannedRun) -> EngineMemory:
        """Returns the native engine's memory.

        Its cache fits a step's samples, or the largest rollout buffer with partial rollouts; each weight sync brings
        its weights.
        """
        config, arch, grid, rollout = run.config, run.arch, run.grid, run.config.rollout
        copies, in_fp8_bytes = matrix_elements(arch, grid.rollout_tp, grid.rollout_ep)[0] * run.device.engine_copies, 0
        if rollout.quantization is not None:
            dtype = rollout.dtype or config.model.dtype
            in_fp8_bytes = native_weight_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, rollout.quantization)[1]
            copies = copies or in_fp8_bytes * item_bytes(config)  # dequantized weights for the products
        size = run.device.engine_copies or item_bytes(config)
        slots = math.ceil(longest(config) / SLOT_MULTIPLE) * SLOT_MULTIPLE
        windowed = len(arch.windowed_layers)
        row_bytes = sequence_bytes(arch, slots, grid.rollout_tp, size, layers=len(arch.softmax_layers) - windowed)
        if (state := state_shape(arch, grid.rollout_tp)) is not None:
            row_bytes += state.row_bytes(size)
        if arch.sliding_window is not None:
            ring = min(slots, ring_slots(arch.sliding_window))
            row_bytes += sequence_bytes(arch, ring, grid.rollout_tp, size, layers=windowed)
        if (record := routing_format(arch, rollout)) is not None:
            row_bytes += slots * record.token_bytes
        if rollout.speculative.method is not None and run.device.is_host:  # GPUs do not draft tokens
            row_bytes += slots * History.token_bytes()
        rows = min(rollout.max_num_seqs, rollout.max_num_batched_tokens, run.most_sequences)
        if run.device.capacity is not None:
            free = run.device.capacity - run.device.allowance - run.weights - copies - run.actor
            free -= experts_work(arch, grid, rollout.max_num_batched_tokens)
            rows = min(rows, max(0, int(free * rollout.gpu_memory_utilization)) // row_bytes)
        cast = 0
        if rollout.dtype not in (None, config.model.dtype) or in_fp8_bytes:  # a bucket in the engine's dtype
            cast = min(run.weights, bucket_bytes(config)) + FP8_WORK * FP32_BYTES * min(in_fp8_bytes, BAND_ELEMENTS)
        largest = max(arch.vocab_size, 2 * arch.intermediate_size) * arch.hidden_size // grid.rollout_tp
        own = {"engine's weights": run.weights, "engine's packed copies": copies}
        return EngineMemory(
            held={} if rollout.free_cache_engine else own,
            awake=own if rollout.free_cache_engine else {},
            refit={"refit's casts and packing": max(cast, largest * run.device.engine_copies)},
            cache=max(1, rows) * row_bytes,
            rows=rows,
            rollout=generation_bytes(run, size, rows),
        )
