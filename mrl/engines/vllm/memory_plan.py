"""Memory of vLLM, whose cache is sized for the longest sequences and whose weights sleep in host memory."""

from __future__ import annotations

import functools

from mrl.config.config import Config
from mrl.engines._memory_plan import (
    EngineMemory,
    MemoryPlan,
    PlannedRun,
    generation_bytes,
    item_bytes,
    model_bytes,
    quantization_bytes,
    quantized_layouts,
    share_of_free,
    token_elements,
)
from mrl.engines.native.decode_state import routing_format
from mrl.engines.vllm.kv_cache import derived_bytes, kv_cache
from mrl.engines.vllm.kv_cache import item_bytes as cache_element_bytes
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout
from mrl.resharding.vllm import vllm_layout, vllm_layouts

PINNED = 2
"""Upper bound of pinned memory per byte: torch rounds each allocation up to a power of two."""


class VllmMemoryPlan(MemoryPlan):
    """Memory of vLLM; its additional memory on a GPU is assumed to be TensorRT-LLM's."""

    has_paged_cache = True

    def weight_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the size of vLLM's weights on a rank, bytes."""
        dtype = config.rollout.dtype or config.model.dtype
        derived = derived_bytes(arch, grid.rollout_tp, item_bytes(config))
        return derived + _vllm_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, config.rollout.quantization)

    def arriving_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the bytes of the parameters that a weight sync writes on a rank."""
        return self.weight_bytes(config, arch, grid) - derived_bytes(arch, grid.rollout_tp, item_bytes(config))

    def layouts(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[int, Layout]:
        """Returns rank -> layout of the parameters that a weight sync writes, without FP8 scales."""
        dtype = config.rollout.dtype or config.model.dtype
        return quantized_layouts(vllm_layouts(arch, grid, dtype), config, arch)

    def cache_item_bytes(self, config: Config) -> float:
        """Returns the bytes of one element of vLLM's KV cache, which can be FP8."""
        return float(cache_element_bytes(config.rollout, item_bytes(config)))

    def memory(self, run: PlannedRun) -> EngineMemory:
        """Returns vLLM's memory; its cache is sized for the longest sequences, its weights sleep in host memory.

        On a CPU it frees nothing. Its additional memory on a GPU is assumed to be TensorRT-LLM's.
        """
        config, rollout = run.config, run.config.rollout
        size = item_bytes(config)
        sizing = kv_cache(rollout, run.arch, size)
        cache = sizing.wanted_bytes
        if run.device.capacity is not None:
            cache = min(cache, share_of_free(run, run.weights + run.actor))
        rows = min(rollout.max_num_seqs, run.num_samples, cache // sizing.sequence_bytes)
        part = {"engine's weights": run.weights}
        token_bytes = token_elements(run.arch, run.grid.rollout_tp) * cache_element_bytes(rollout, size)
        record = routing_format(run.arch, rollout)
        routing_bytes = 0 if record is None else cache // token_bytes * record.token_bytes  # in host memory
        if run.device.is_host:
            part["vLLM's KV cache"] = cache
            part["experts of what is cached"] = routing_bytes
        sleeps = rollout.free_cache_engine and not run.device.is_host
        own = {} if run.device.is_host else {"vLLM's own": run.device.engine_allowance}
        return EngineMemory(
            held=own if sleeps else own | part,
            awake=part if sleeps else {},
            refit=quantization_bytes(config, run.arch, run.grid),
            cache=0 if run.device.is_host else max(cache, sizing.sequence_bytes),
            rows=rows,
            rollout=generation_bytes(run, size, rows),
            host=(PINNED * run.weights if sleeps else 0) + routing_bytes,
        )


@functools.cache
def _vllm_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> int:
    """Returns the size of vLLM's weights on a rank; all ranks of a replica have equally many."""
    return model_bytes(arch, lambda one: vllm_layout(one, tp, 0, dtype, ep_size=ep, quantization=quantization))
