"""Sizes of an engine's weights, cache and work memory on a rank, predicted from a config for `mrl plan`.

The module `memory_plan` of each engine derives from `MemoryPlan`. TensorRT-LLM and vLLM on a GPU were not measured:
their weights, cache and mrl's buffers follow from shapes and the meaning of their settings; the rest is assumed.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config.config import Config
from mrl.engines.native.experts import work_bytes
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.copy_op import ITEM_BYTES, num_bytes
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.fp8 import block_grids, fp8_layout, scale_tables
from mrl.resharding.fp8_quantize import BAND_ELEMENTS
from mrl.resharding.layout import Layout
from mrl.resharding.layout_index import distinct_layouts
from mrl.resharding.native import native_layout
from mrl.resharding.shards import counted_tensors

FP32_BYTES = 4
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


@dataclass(frozen=True)
class PlannedRun:
    """Run on a rank for which an engine predicts its memory.

    Attributes:
        config: Config of the run.
        arch: Architecture of the model.
        grid: Parallel layout.
        device: Device of the rank.
        weights: Size of the engine's weights, from `MemoryPlan.weight_bytes`, bytes.
        actor: Actor memory on the device when the engine measures the free memory, bytes.
        num_samples: Number of sequences that a replica generates in a step.
        most_sequences: Most sequences that a replica holds, with partial rollouts.
    """

    config: Config
    arch: ArchSpec
    grid: ParallelLayout
    device: Device
    weights: int
    actor: int
    num_samples: int
    most_sequences: int


class MemoryPlan(ABC):
    """Predicted sizes of an engine.

    Attributes:
        discards_weights: Name of the library if it discards the weights of a sleeping engine; "": they are moved to
            host memory.
        has_paged_cache: True if the KV cache holds more sequences where they are shorter; False if each sequence has
            room for its full length.
    """

    discards_weights = ""
    has_paged_cache = False

    @abstractmethod
    def weight_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the size of the engine's weights on the fullest rank of a replica, bytes."""

    def arriving_bytes(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
        """Returns the most bytes that a weight sync sends to a rank's engine."""
        return self.weight_bytes(config, arch, grid)

    @abstractmethod
    def layouts(self, config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[int, Layout]:
        """Returns rank -> layout of the tensors that its engine receives in a weight sync, without FP8 scales.

        Equal layouts are one object.
        """

    def cache_item_bytes(self, config: Config) -> float:
        """Returns the bytes of one element of the engine's KV cache."""
        return float(item_bytes(config))

    @abstractmethod
    def memory(self, run: PlannedRun) -> EngineMemory:
        """Returns the memory of the run's engine on a rank."""


def item_bytes(config: Config) -> int:
    return ITEM_BYTES[config.rollout.dtype or config.model.dtype]


def bucket_bytes(config: Config) -> int:
    return config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20


def longest(config: Config) -> int:
    return config.rollout.prompt_length + config.rollout.response_length


def token_elements(arch: ArchSpec, tp: int, *, layers: int | None = None) -> int:
    """Returns the number of elements of a token's keys and values on an engine's rank.

    With latent attention each rank has the latent vector and the rotated key, of which the values are products.
    """
    counted = len(arch.softmax_layers) if layers is None else layers
    if arch.mla is not None:
        return counted * arch.mla.cache_dim
    return 2 * counted * max(1, arch.num_kv_heads // tp) * arch.head_dim


def sequence_bytes(arch: ArchSpec, slots: int, tp: int, size: int, *, layers: int | None = None) -> int:
    return slots * token_elements(arch, tp, layers=layers) * size


def experts_work(arch: ArchSpec, grid: ParallelLayout, tokens: int) -> int:
    """Returns the work memory of the native engine's MoE layer, bytes."""
    if arch.moe is None:
        return 0
    return work_bytes(tokens * arch.moe.top_k, arch.hidden_size, arch.moe.intermediate_size // grid.rollout_moe_tp)


def generation_bytes(run: PlannedRun, size: int, rows: int) -> dict[str, int]:
    """Returns the larger of the logits of running sequences and the hidden states of the prompts in prefill."""
    arch, grid, rollout = run.arch, run.grid, run.config.rollout
    if not rows:
        return {}
    parts = 3 if grid.rollout_tp > 1 else 1  # this rank's, all ranks', and all of them concatenated
    logits = rows * arch.vocab_size * (parts * size + FP32_BYTES + (FP32_BYTES if size != FP32_BYTES else 0))
    prompts = math.ceil(run.config.train.batch_size / grid.num_replicas)
    states = hidden_bytes(run, size, min(rollout.max_num_batched_tokens, min(rows, prompts) * rollout.prompt_length))
    return {"logits of sampling": logits} if logits >= states else {"hidden states of prompts": states}


def hidden_bytes(run: PlannedRun, size: int, tokens: int) -> int:
    """Returns the bytes of the hidden states of `tokens` tokens in one layer."""
    arch, grid = run.arch, run.grid
    if arch.mla is not None:  # each query of a head has the size of a latent vector
        attention = 3 * (arch.num_heads // grid.rollout_tp + 1) * arch.mla.cache_dim
    else:
        heads = (arch.num_heads + 2 * max(grid.rollout_tp, arch.num_kv_heads)) // grid.rollout_tp
        attention = 3 * heads * arch.head_dim
    mlp = experts_work(arch, grid, tokens)
    if arch.has_dense_layers:
        mlp = max(mlp, tokens * (3 * arch.intermediate_size // grid.rollout_tp) * size)
    return max(tokens * attention * size, mlp) + 3 * tokens * arch.hidden_size * size


def share_of_free(run: PlannedRun, taken: int) -> int:
    """Returns the KV cache that `rollout.gpu_memory_utilization` allows on a device with `taken` bytes in use."""
    device = run.device
    total = device.total if device.total is not None else device.capacity or 0
    free = total - device.allowance - device.engine_allowance - taken
    return int(max(0, free) * run.config.rollout.gpu_memory_utilization)


def quantization_bytes(config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[str, int]:
    """Returns the work memory for a band of a matrix that a weight sync quantizes to FP8."""
    quantization, dtype = config.rollout.quantization, config.rollout.dtype or config.model.dtype
    if quantization is None:
        return {}
    in_fp8_bytes = native_weight_bytes(arch, grid.rollout_tp, grid.rollout_ep, dtype, quantization)[1]
    return {"quantization in a weight sync": FP8_WORK * FP32_BYTES * min(in_fp8_bytes, BAND_ELEMENTS)}


def quantized_layouts(layouts: dict[int, Layout], config: Config, arch: ArchSpec) -> dict[int, Layout]:
    """Returns rank -> layout with the matrices of `rollout.quantization` in FP8; equal layouts stay shared."""
    grids = block_grids(arch, config.rollout.quantization)
    converted = {id(layout): fp8_layout(layout, grids) for layout in distinct_layouts(layouts)}
    return {rank: converted[id(layout)] for rank, layout in layouts.items()}


def model_bytes(arch: ArchSpec, layout_of: Callable[[ArchSpec], Layout]) -> int:
    """Returns the size of a model's tensors; arguments as for `counted_tensors`."""
    return sum(num_bytes(stored) * count for _, stored, count in counted_tensors(arch, layout_of))


@functools.cache
def matrix_elements(arch: ArchSpec, tp: int, ep: int) -> tuple[int, int]:
    """Returns (elements of the native engine's matrices, other elements) on a rank."""
    matrices, others = 0, 0
    for name, stored, times in counted_tensors(arch, lambda one: native_layout(one, tp, 0, "bfloat16", ep_size=ep)):
        count = math.prod(stored.shape) * times
        if len(stored.shape) == 2 and (name != "embed" or arch.tie_word_embeddings):
            matrices += count
        else:
            others += count
    return matrices, others


@functools.cache
def native_weight_bytes(arch: ArchSpec, tp: int, ep: int, dtype: str, quantization: str | None) -> tuple[int, int]:
    """Returns (bytes of the native engine's weights and FP8 scales on a rank, bytes of the FP8 weights among them).

    The maximum over the tensor-parallel ranks, which differ in the number of scales.

    Args:
        arch: Architecture of the model.
        tp: Tensor-parallel size of the replica.
        ep: Expert-parallel size of the replica.
        dtype: Dtype of weights that are not quantized.
        quantization: `rollout.quantization`.
    """

    def layout_of(one: ArchSpec, position: int) -> Layout:
        grids = block_grids(one, quantization)
        layout = fp8_layout(native_layout(one, tp, position, dtype, ep_size=ep), grids)
        return {**layout, **scale_tables(layout, grids)}

    found = []
    for position in range(tp if quantization is not None else 1):
        counted = counted_tensors(arch, functools.partial(layout_of, position=position))
        sizes = [(num_bytes(stored) * count, stored.dtype) for _, stored, count in counted]
        found.append((sum(size for size, _ in sizes), sum(size for size, kind in sizes if kind == FP8)))
    return max(found)
