"""How much memory an engine takes of a rank: what it holds, what it holds awake, its cache, and what a refit adds.

Owns what differs between the engines; the phases of a run are put together in `memory.py`. The native engine is counted
as it allocates. TensorRT-LLM was not measured: its weights, its cache and mrl's own buffers for it follow from shapes
and from what its settings mean, and what it takes besides is `Hardware.engine_context_bytes`, an assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mrl.algorithms.functional.sampling import truncates
from mrl.commands.plan.engine_weights import native_bytes, packed_elements, whole_bytes
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
from mrl.rollout.async_schedule import Schedule
from mrl.trainer.resolve import Resolved

FP32_BYTES = 4
PINNED = 2
"""Bytes of pinned memory for a byte at most: torch rounds each piece up to a power of two."""
FP8_WORK = 3
"""Tensors in fp32 of a band of a matrix while it is quantised: values, factors, products."""


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
        te: The actor's layers are TransformerEngine's, as on GPUs.
        engine_copies: Bytes of an element of the engine's packed copies of its matrices, in which it then computes, as
            on CPUs; 0: it has none.
        is_host: Its memory is the host's, so that what waits in host memory counts too.
        compiles: Its host has a C compiler, without which the actor on a CPU keeps more of a forward pass.
        capacity: Bytes of the device that can be filled; None: unbounded.
        allowance: Bytes of it that no tensor takes: context, communicators.
        total: All its bytes, which is what an engine sees; None: `capacity`.
        engine_allowance: Bytes that TensorRT-LLM takes besides, awake or asleep.
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
    """What an engine takes of a rank: term -> bytes.

    Attributes:
        held: All the time.
        awake: From the refit to the end of the rollout.
        refit: In a refit besides.
        cache: The KV cache.
        rows: Sequences that it has room for.
        rollout: While generating besides.
        host: Bytes in host memory while it sleeps.
    """

    held: dict[str, int]
    cache: int
    rows: int
    awake: dict[str, int] = field(default_factory=dict)
    refit: dict[str, int] = field(default_factory=dict)
    rollout: dict[str, int] = field(default_factory=dict)
    host: int = 0


def engine_memory(found: Resolved, device: Device, *, weights: int, actor: int) -> EngineMemory:
    """What the run's engine takes of a rank.

    Args:
        found: The run.
        device: Of the rank.
        weights: Of the engine, `weight_bytes`.
        actor: Bytes of the actor on the device when the engine looks how much is free.
    """
    make = {"trtllm": _llm, "trtllm_engine": _built, "vllm": _vllm}.get(found.config.rollout.name, _native)
    return make(found, device, weights, actor)


# the native engine


def _native(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Its cache is for a step's prompts, or all in flight where sampling may stop; its weights come with each refit."""
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    copies, in_fp8_bytes = packed_elements(arch, grid) * device.engine_copies, 0
    if rollout.quantization is not None:
        dtype = rollout.dtype or config.model.dtype
        in_fp8_bytes = native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, rollout.quantization)[1]
        copies = copies or in_fp8_bytes * _item_bytes(config)  # products are of the weights that FP8 stands for
    size = device.engine_copies or _item_bytes(config)
    slots = math.ceil(_longest(config) / SLOT_MULTIPLE) * SLOT_MULTIPLE
    row_bytes = _row_bytes(arch, slots, grid.rollout_tp, size)
    if (record := record_of(arch, rollout)) is not None:
        row_bytes += slots * record.token_bytes
    if rollout.speculative.method is not None and device.is_host:  # elsewhere nothing is drafted
        row_bytes += slots * History.token_bytes()
    schedule = Schedule.of(config)
    asked = schedule.most_in_flight * rollout.n if schedule.by_parts else _samples(found)
    rows = min(rollout.max_num_seqs, rollout.max_num_batched_tokens, asked)
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
    """The LLM API: the cache is a part of what was free when it was made, used or not; weights sleep in host memory.

    TensorRT-LLM subtracts what a trial pass takes before it makes the cache; that is left out, so that the cache is
    counted too large rather than too small.
    """
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    size, elements = _item_bytes(config), token_elements(arch, grid.rollout_tp)
    asked = kv_cache(rollout, size)
    row_bytes = asked.row_bytes(elements, _longest(config))
    rows = min(rollout.max_num_seqs, _samples(found))
    most = rows * row_bytes if device.capacity is None else _share_of_free(found, device, weights + actor)
    cache = asked.bounded(most, elements)
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
    """What a refit of the LLM API holds of whole tensors: up to a bucket, and as much that is being put together."""
    dtype = config.rollout.dtype or config.model.dtype
    tp, ep, quantization = grid.rollout_tp, grid.rollout_ep, config.rollout.quantization
    whole = whole_bytes(arch, tp, ep, dtype, quantization)
    if arch.family in WHOLE_ONLY:
        return {"whole model of a refit": whole}
    largest = max(arch.vocab_size, arch.intermediate_size) * arch.hidden_size * ITEM_BYTES[dtype]
    staged = {"whole tensors of a refit": min(whole, 2 * (_bucket_bytes(config) + largest))}
    return staged | _quantising(config, arch, grid)


def _quantising(config: Config, arch: ArchSpec, grid: Grid) -> dict[str, int]:
    """What a refit holds of a band of a matrix on its way into FP8."""
    quantization, dtype = config.rollout.quantization, config.rollout.dtype or config.model.dtype
    if quantization is None:
        return {}
    in_fp8_bytes = native_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, quantization)[1]
    return {"quantising of a refit": FP8_WORK * FP32_BYTES * min(in_fp8_bytes, BAND_ELEMENTS)}


def _built(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Built engines: a second copy of the rank's weights in a refit; only the cache leaves the device."""
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    size = _item_bytes(config)
    cut = truncates(rollout.top_k, rollout.top_p, rollout.min_p)
    row_bytes = _row_bytes(arch, _longest(config), grid.rollout_tp, size, layers=arch.num_layers // grid.rollout_pp)
    if cut:  # logits of every step, twice while they are stacked
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
    """Bytes that `rollout.gpu_memory_utilization` gives to the cache of an engine that sees the whole device."""
    total = device.total if device.total is not None else device.capacity or 0
    free = total - device.allowance - device.engine_allowance - taken
    return int(max(0, free) * found.config.rollout.gpu_memory_utilization)


# vLLM


def _vllm(found: Resolved, device: Device, weights: int, actor: int) -> EngineMemory:
    """Its cache is made at the start, as large as the longest sequences need; weights sleep in host memory.

    On a CPU it frees nothing. What it takes besides on a GPU is assumed to be what TensorRT-LLM takes.
    """
    config, rollout = found.config, found.config.rollout
    size = _item_bytes(config)
    asked = vllm_kv_cache(rollout, found.arch, size)
    cache = asked.wanted_bytes
    if device.capacity is not None:
        cache = min(cache, _share_of_free(found, device, weights + actor))
    rows = min(rollout.max_num_seqs, _samples(found), cache // asked.sequence_bytes)
    part = {"engine's weights": weights}
    token_bytes = token_elements(found.arch, found.grid.rollout_tp) * vllm_item_bytes(rollout, size)
    record = record_of(found.arch, rollout)
    told = 0 if record is None else cache // token_bytes * record.token_bytes  # beside the cache, in host memory
    if device.is_host:
        part["vLLM's KV cache"] = cache
        part["experts of what is cached"] = told
    sleeps = rollout.free_cache_engine and not device.is_host
    own = {} if device.is_host else {"vLLM's own": device.engine_allowance}
    return EngineMemory(
        held=own if sleeps else own | part,
        awake=part if sleeps else {},
        refit=_quantising(config, found.arch, found.grid),
        cache=0 if device.is_host else max(cache, asked.sequence_bytes),
        rows=rows,
        rollout=_generation(found, size, rows),
        host=(PINNED * weights if sleeps else 0) + told,
    )


# shapes


def _item_bytes(config: Config) -> int:
    return ITEM_BYTES[config.rollout.dtype or config.model.dtype]


def _bucket_bytes(config: Config) -> int:
    return config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20


def _longest(config: Config) -> int:
    return config.rollout.prompt_length + config.rollout.response_length


def _samples(found: Resolved) -> int:
    """Sequences that a replica is asked for in a step."""
    return math.ceil(found.config.train.batch_size / found.grid.num_replicas) * found.config.rollout.n


def token_elements(arch: ArchSpec, tp: int, *, layers: int | None = None) -> int:
    """Keys and values of one token on a rank of an engine."""
    return 2 * (layers or arch.num_layers) * max(1, arch.num_kv_heads // tp) * arch.head_dim


def cache_item_bytes(config: Config) -> float:
    """Of one element of the engine's KV cache."""
    size = _item_bytes(config)
    if config.rollout.name == "vllm":
        return float(vllm_item_bytes(config.rollout, size))
    return kv_cache(config.rollout, size).item_bytes if config.rollout.name == "trtllm" else float(size)


def _row_bytes(arch: ArchSpec, slots: int, tp: int, size: int, *, layers: int | None = None) -> int:
    """Keys and values of one sequence."""
    return slots * token_elements(arch, tp, layers=layers) * size


def _experts_work(arch: ArchSpec, grid: Grid, tokens: int) -> int:
    """What the engine reckons with for its experts."""
    if arch.moe is None:
        return 0
    return work_bytes(tokens * arch.moe.top_k, arch.hidden_size, arch.moe.intermediate_size // grid.rollout_moe_tp)


def _generation(found: Resolved, size: int, rows: int) -> dict[str, int]:
    """Logits of the running sequences, or hidden states of the prompts that are read."""
    arch, grid, rollout = found.arch, found.grid, found.config.rollout
    if not rows:
        return {}
    parts = 3 if grid.rollout_tp > 1 else 1  # this rank's, all ranks', and these put together
    logits = rows * arch.vocab_size * (parts * size + FP32_BYTES + (FP32_BYTES if size != FP32_BYTES else 0))
    prompts = math.ceil(found.config.train.batch_size / grid.num_replicas)
    states = _states(found, size, min(rollout.max_num_batched_tokens, min(rows, prompts) * rollout.prompt_length))
    return {"logits of sampling": logits} if logits >= states else {"hidden states of prompts": states}


def _states(found: Resolved, size: int, tokens: int) -> int:
    """Hidden states of so many tokens in one layer."""
    arch, grid = found.arch, found.grid
    heads = (arch.num_heads + 2 * max(grid.rollout_tp, arch.num_kv_heads)) // grid.rollout_tp
    attention = 3 * heads * arch.head_dim
    if arch.moe is None:
        mlp = tokens * (3 * arch.intermediate_size // grid.rollout_tp) * size
    else:
        mlp = _experts_work(arch, grid, tokens)
    return max(tokens * attention * size, mlp) + 3 * tokens * arch.hidden_size * size
