"""Memory of a rollout engine on a rank: weights, KV cache, and the peaks of generation and weight sync.

The native engine is counted as it allocates. TensorRT-LLM was not measured: its weights, cache and mrl's buffers follow
from shapes and the meaning of its settings; the rest is the assumption `Hardware.engine_context_bytes`. `memory.py`
combines the phases of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mrl.algorithms.functional.sampling import truncates
from mrl.commands.plan.engine_weights import full_bytes, native_bytes, packed_elements
from mrl.config.config import Config
from mrl.engines.native.decode_state import record_of
from mrl.engines.native.experts import work_bytes
from mrl.engines.native.kv_cache import SLOT_MULTIPLE
from mrl.engines.native.ngram_history import History
from mrl.engines.trtllm.kv_cache import kv_cache
from mrl.engines.vllm.kv_cache import item_bytes as vllm_item_bytes
from mrl.engines.vllm.kv_cache import kv_cache as vllm_kv_cache
from mrl.models.base import ArchSpec
from mrl.parallel_layout import Grid
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.fp8_quantize import BAND_ELEMENTS
from mrl.resharding.trtllm_reads import WHOLE_ONLY
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.trainer.resolve import Resolved

FP32_BYTES = 4
PINNED = 2
"""Upper bound of pinned memory per byte: torch rounds each allocation up to a power of two."""
FP8_WORK = 3
"""Number of fp32 tensors per band of a matrix during quantization: values, factors, products."""


@dataclass(frozen=True)
class Device:
    """Device of a rank.

    Attributes:
        te: The actor uses TransformerEngine layers, as on GPUs.
        engine_copies: Bytes per element of the packed copies with which the engine computes on a CPU; 0: it has none.
        is_host: Device memory is host memory (CPU), so that offloaded tensors count too.
        compiles: The host has a C compiler, without which the actor on a CPU saves more activations.
        capacity: Usable memory, bytes; None: unlimited.
        allowance: Memory for context and communicators, bytes.
        total: Total memory, which the engine sees, bytes; None: `capacity`.
        engine_allowance: Additional memory of TensorRT-LLM or vLLM, awake or asleep, bytes.
    """

    te: bool
    engine_copies: int = 0
    is_host: bool = False
    compiles: bool = True
    capacity: int | None = None
    allowance: int = 0
    total: int | None = None
    engine_allowance: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine on a rank: term -> bytes.

    Attributes:
        held: Terms in every phase.
        cache: Size of the KV cache, bytes.
        rows: Number of sequences that fit into the cache.
        awake: Terms from the weight sync to the end of the rollout.
        refit: Additional terms in a weight sync.
        rollout: Additional terms during generation.
        host: Host memory while the engine sleeps, bytes.
    """

    held: dict[str, int]
    cache: int
    rows: int
    awake: dict[str, int] = field(default_factory=dict)
    refit: dict[str, int] = field(default_factory=dict)
    rollout: dict[str, int] = field(default_factory=dict)
    host: int = 0


def engine_memory(found: Resolved, device: Device, *, weights: int, actor: int) -> EngineMemory:
    """Returns the memory of the run's engine on a rank.

    Args:
        found: Resolved run.
        device: Device of the rank.
        weights: Size of the engine's weights, from `weight_bytes`, bytes.
        actor: Actor memory on the device when the engine measures the free memory, bytes.
    """
    make = {"trtllm": _llm, "trtllm_engine": _built, "vllm": _vllm}.get(found.config.rollout.name, _native)
    return make(found, device, weights, actor)


# the native engine


def _native(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Returns the native engine's memory.

    Its cache fits a step's samples, or the largest rollout buffer with partial rollouts; each weight sync brings its
    weights.
    """
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    copies, in_fp8_bytes = packed_elements(arch, grid) * device.engine_copies, 0
    if rollout.quantization is not None:
        dtype = rollout.dtype or config.model.dtype
        in_fp8_bytes = native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, rollout.quantization)[1]
        copies = copies or in_fp8_bytes * _item_bytes(config)  # dequantized weights for the products
    size = device.engine_copies or _item_bytes(config)
    slots = math.ceil(_longest(config) / SLOT_MULTIPLE) * SLOT_MULTIPLE
    row_bytes = _row_bytes(arch, slots, grid.rollout_tp, size)
    if (record := record_of(arch, rollout)) is not None:
        row_bytes += slots * record.token_bytes
    if rollout.speculative.method is not None and device.is_host:  # GPUs do not draft tokens
        row_bytes += slots * History.token_bytes()
    schedule = RolloutSchedule.of(config)
    sequences = schedule.most_in_flight * rollout.n if schedule.by_parts else _samples(found)
    rows = min(rollout.max_num_seqs, rollout.max_num_batched_tokens, sequences)
    if device.capacity is not None:
        free = device.capacity - device.allowance - weights - copies - actor
        free -= _experts_work(arch, grid, rollout.max_num_batched_tokens)
        rows = min(rows, max(0, int(free * rollout.gpu_memory_utilization)) // row_bytes)
    cast = 0
    if rollout.dtype not in (None, config.model.dtype) or in_fp8_bytes:  # a bucket in the engine's dtype
        cast = min(weights, _bucket_bytes(config)) + FP8_WORK * FP32_BYTES * min(in_fp8_bytes, BAND_ELEMENTS)
    largest = max(arch.vocab_size, 2 * arch.intermediate_size) * arch.hidden_size // grid.rollout_tp
    own = {"engine's weights": weights, "engine's packed copies": copies}
    return EngineMemory(
        held={} if rollout.free_cache_engine else own,
        awake=own if rollout.free_cache_engine else {},
        refit={"refit's casts and packing": max(cast, largest * device.engine_copies)},
        cache=max(1, rows) * row_bytes,
        rows=rows,
        rollout=_generation(found, size, rows),
    )


# TensorRT-LLM


def _llm(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Returns the memory of TensorRT-LLM's LLM API, whose weights sleep in host memory.

    Its cache is a fixed fraction of the memory that was free at the start. TensorRT-LLM first subtracts the peak of a
    trial pass; that is ignored here, so the cache is overestimated.
    """
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    size, elements = _item_bytes(config), token_elements(arch, grid.rollout_tp)
    sizing = kv_cache(rollout, size)
    row_bytes = sizing.row_bytes(elements, _longest(config))
    rows = min(rollout.max_num_seqs, _samples(found))
    most = rows * row_bytes if device.capacity is None else _share_of_free(found, device, weights + actor)
    cache = sizing.bounded(most, elements)
    rows = min(rows if device.capacity is None else rollout.max_num_seqs, cache // row_bytes)
    held = {"TensorRT-LLM's own": device.engine_allowance}
    part = {"engine's weights": weights}
    return EngineMemory(
        held=held if rollout.free_cache_engine else held | part,
        awake=part if rollout.free_cache_engine else {},
        refit=_staged(config, arch, grid),
        cache=max(cache, row_bytes),
        rows=rows,
        rollout=_generation(found, size, rows),
        host=weights if rollout.free_cache_engine else 0,
    )


def _staged(config: Config, arch: ArchSpec, grid: Grid) -> dict[str, int]:
    """Returns the staging of a weight sync into the LLM API: a bucket of full tensors, and as much being assembled."""
    dtype = config.rollout.dtype or config.model.dtype
    tp, ep, quantization = grid.rollout_tp, grid.rollout_ep, config.rollout.quantization
    unsharded = full_bytes(arch, tp, ep, dtype, quantization)
    if arch.family in WHOLE_ONLY:
        return {"whole model of a refit": unsharded}
    largest = max(arch.vocab_size, arch.intermediate_size) * arch.hidden_size * ITEM_BYTES[dtype]
    staged = {"whole tensors of a refit": min(unsharded, 2 * (_bucket_bytes(config) + largest))}
    return staged | _quantizing(config, arch, grid)


def _quantizing(config: Config, arch: ArchSpec, grid: Grid) -> dict[str, int]:
    """Returns the work memory for a band of a matrix that a weight sync quantizes to FP8."""
    quantization, dtype = config.rollout.quantization, config.rollout.dtype or config.model.dtype
    if quantization is None:
        return {}
    in_fp8_bytes = native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, quantization)[1]
    return {"quantising of a refit": FP8_WORK * FP32_BYTES * min(in_fp8_bytes, BAND_ELEMENTS)}


def _built(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Returns the memory of built TensorRT engines: a weight sync needs a second copy; only the cache is freed."""
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    size = _item_bytes(config)
    cut = truncates(rollout.top_k, rollout.top_p, rollout.min_p)
    row_bytes = _row_bytes(arch, _longest(config), grid.rollout_tp, size, layers=arch.num_layers // grid.rollout_pp)
    if cut:  # logits of every step, twice while they are being stacked
        row_bytes += 2 * FP32_BYTES * rollout.response_length * arch.vocab_size
    rows = min(rollout.max_num_seqs, max(1, rollout.max_num_batched_tokens // rollout.prompt_length), _samples(found))
    work = _states(found, size, rollout.max_num_batched_tokens)
    if device.capacity is not None:
        rows = min(rows, _share_of_free(found, device, weights + actor + work) // row_bytes)
    return EngineMemory(
        held={
            "engine's weights": weights,
            "TensorRT's activations": work,
            "TensorRT-LLM's own": device.engine_allowance,
        },
        refit={"second copy of the weights": weights},
        cache=max(1, rows) * row_bytes,
        rows=rows,
    )


def _share_of_free(found: Resolved, device: Device, taken: int) -> int:
    """Returns the KV cache that `rollout.gpu_memory_utilization` allows on a device with `taken` bytes in use."""
    total = device.total if device.total is not None else device.capacity or 0
    free = total - device.allowance - device.engine_allowance - taken
    return int(max(0, free) * found.config.rollout.gpu_memory_utilization)


# vLLM


def _vllm(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Returns vLLM's memory; its cache is sized for the longest sequences, its weights sleep in host memory.

    On a CPU it frees nothing. Its additional memory on a GPU is assumed to be TensorRT-LLM's.
    """
    config, rollout = found.config, found.config.rollout
    size = _item_bytes(config)
    sizing = vllm_kv_cache(rollout, found.arch, size)
    cache = sizing.wanted_bytes
    if device.capacity is not None:
        cache = min(cache, _share_of_free(found, device, weights + actor))
    rows = min(rollout.max_num_seqs, _samples(found), cache // sizing.sequence_bytes)
    part = {"engine's weights": weights}
    token_bytes = token_elements(found.arch, found.grid.rollout_tp) * vllm_item_bytes(rollout, size)
    record = record_of(found.arch, rollout)
    routing_bytes = 0 if record is None else cache // token_bytes * record.token_bytes  # in host memory
    if device.is_host:
        part["vLLM's KV cache"] = cache
        part["experts of what is cached"] = routing_bytes
    sleeps = rollout.free_cache_engine and not device.is_host
    own = {} if device.is_host else {"vLLM's own": device.engine_allowance}
    return EngineMemory(
        held=own if sleeps else own | part,
        awake=part if sleeps else {},
        refit=_quantizing(config, found.arch, found.grid),
        cache=0 if device.is_host else max(cache, sizing.sequence_bytes),
        rows=rows,
        rollout=_generation(found, size, rows),
        host=(PINNED * weights if sleeps else 0) + routing_bytes,
    )


# shapes


def _item_bytes(config: Config) -> int:
    return ITEM_BYTES[config.rollout.dtype or config.model.dtype]


def _bucket_bytes(config: Config) -> int:
    return config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20


def _longest(config: Config) -> int:
    return config.rollout.prompt_length + config.rollout.response_length


def _samples(found: Resolved) -> int:
    """Returns the number of sequences that a replica generates in a step."""
    return math.ceil(found.config.train.batch_size / found.grid.num_replicas) * found.config.rollout.n


def token_elements(arch: ArchSpec, tp: int, *, layers: int | None = None) -> int:
    """Returns the number of elements of a token's keys and values on an engine's rank."""
    return 2 * (layers or arch.num_layers) * max(1, arch.num_kv_heads // tp) * arch.head_dim


def cache_item_bytes(config: Config) -> float:
    """Returns the bytes of one element of the engine's KV cache."""
    size = _item_bytes(config)
    if config.rollout.name == "vllm":
        return float(vllm_item_bytes(config.rollout, size))
    return kv_cache(config.rollout, size).item_bytes if config.rollout.name == "trtllm" else float(size)


def _row_bytes(arch: ArchSpec, slots: int, tp: int, size: int, *, layers: int | None = None) -> int:
    return slots * token_elements(arch, tp, layers=layers) * size


def _experts_work(arch: ArchSpec, grid: Grid, tokens: int) -> int:
    """Returns the work memory of the native engine's MoE layer, bytes."""
    if arch.moe is None:
        return 0
    return work_bytes(tokens * arch.moe.top_k, arch.hidden_size, arch.moe.intermediate_size // grid.rollout_moe_tp)


def _generation(found: Resolved, size: int, rows: int) -> dict[str, int]:
    """Returns the larger of the logits of running sequences and the hidden states of the prompts in prefill."""
    arch, grid, rollout = found.arch, found.grid, found.config.rollout
    if not rows:
        return {}
    parts = 3 if grid.rollout_tp > 1 else 1  # this rank's, all ranks', and all of them concatenated
    logits = rows * arch.vocab_size * (parts * size + FP32_BYTES + (FP32_BYTES if size != FP32_BYTES else 0))
    prompts = math.ceil(found.config.train.batch_size / grid.num_replicas)
    states = _states(found, size, min(rollout.max_num_batched_tokens, min(rows, prompts) * rollout.prompt_length))
    return {"logits of sampling": logits} if logits >= states else {"hidden states of prompts": states}


def _states(found: Resolved, size: int, tokens: int) -> int:
    """Returns the bytes of the hidden states of `tokens` tokens in one layer."""
    arch, grid = found.arch, found.grid
    heads = (arch.num_heads + 2 * max(grid.rollout_tp, arch.num_kv_heads)) // grid.rollout_tp
    attention = 3 * heads * arch.head_dim
    if arch.moe is None:
        mlp = tokens * (3 * arch.intermediate_size // grid.rollout_tp) * size
    else:
        mlp = _experts_work(arch, grid, tokens)
    return max(tokens * attention * size, mlp) + 3 * tokens * arch.hidden_size * size
