"""How much memory a run takes, before it runs: a rank of each pipeline stage, term by term and phase by phase.

Owns the sum: weights, gradients, optimizer, engine, cache, staging, and what `activations.py` says of a pass.
`mrl plan` compares it with a device, `mrl train --dry-run` shows a part of it. Everything is arithmetic on shapes; what
is no shape (context, communicators) is an allowance that the caller states.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from mrl.activations import Activations, ActorShape
from mrl.config import Config
from mrl.engines.native.experts import work_bytes
from mrl.engines.native.kv_cache import SLOT_MULTIPLE
from mrl.engines.native.rows import ROUTED
from mrl.grid import Grid
from mrl.models.base import ArchSpec
from mrl.prepare import Resolved
from mrl.weights.buckets import MIN_ROUND_BYTES, NUM_BUFFERS, PIPELINE_ROUNDS
from mrl.weights.copies import ITEM_BYTES
from mrl.weights.layout import Layout
from mrl.weights.megatron import chunk_layers, megatron_layout
from mrl.weights.native import native_layout

GRADIENT_BYTES = 4
"""Megatron's gradient buffer is fp32 (`grad_reduce_in_fp32`)."""
MOMENT_BYTES = 8
"""Adam's two moments, fp32."""
MASTER_BYTES = 4
"""fp32 master weights, kept where the parameters are of another type."""
FP32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds all the time, by the shapes of its tensors."""

    weights: int
    gradients: int
    optimizer: int
    engine: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.optimizer + self.engine


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
        te: The actor's layers are TransformerEngine's, as on GPUs.
        engine_copies: Bytes of an element of the engine's packed copies of its matrices, in which it then computes, as
            on CPUs; 0: it has none.
        is_host: Its memory is the host's, so that what waits in host memory counts too.
        capacity: Bytes of the device; None: unbounded.
        allowance: Bytes of it that no tensor takes: context, communicators.
    """

    te: bool
    engine_copies: int = 0
    is_host: bool = False
    capacity: int | None = None
    allowance: int = 0


@dataclass(frozen=True)
class StageMemory:
    """What a rank of a pipeline stage holds.

    Attributes:
        stage: Pipeline stage; its ranks hold equal shards.
        rank: The first of them.
        phases: "refit", "rollout", "score" where something is scored without training, "update" -> term -> bytes.
        kv_rows: Sequences that the KV cache has room for.
        host: Bytes in host memory beside the device: what was offloaded, the reference, and the actor while it is away
            for it.
    """

    stage: int
    rank: int
    phases: dict[str, dict[str, int]]
    kv_rows: int
    host: int

    def total(self, phase: str) -> int:
        """Bytes at the phase's peak."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)


def stage_memory(config: Config, arch: ArchSpec, grid: Grid) -> list[Memory]:
    """What a rank of each pipeline stage holds of weights, gradients and optimizer, and the weights of its engine."""
    kept_bytes = MOMENT_BYTES + (MASTER_BYTES if config.model.dtype != "float32" else 0)
    sharded = config.actor.use_distributed_optimizer
    copies = grid.dp * grid.cp if sharded else 1
    expert_copies = grid.world_size // (grid.pp * grid.ep * grid.expert_tp) if sharded else 1
    engine = sum(_engine_elements(arch, grid.rollout_tp, grid.rollout_ep))
    found = []
    for dense, experts in _actor_elements(arch, grid):
        owned = math.ceil(dense / copies) + math.ceil(experts / expert_copies)
        found.append(
            Memory(
                weights=(dense + experts) * ITEM_BYTES[config.model.dtype],
                gradients=(dense + experts) * GRADIENT_BYTES,
                optimizer=owned * kept_bytes,
                engine=engine * ITEM_BYTES[config.rollout.dtype or config.model.dtype],
            )
        )
    return found


def memory_by_stage(found: Resolved, device: Device, *, moved_bytes: int | None = None) -> list[StageMemory]:
    """Every phase of a run, on a rank of each pipeline stage.

    Args:
        found: The run.
        device: Of a rank.
        moved_bytes: Most that a rank sends or gets in a refit; None: all of its engine's weights.
    """
    config, arch, grid, algorithm = found.config, found.arch, found.grid, found.algorithm
    shape = ActorShape(config, arch, grid, te=device.te, supervised=algorithm.supervised)
    held = stage_memory(config, arch, grid)
    scored = algorithm.needs_reference or algorithm.needs_proximal
    stages = []
    for stage, own in enumerate(held):
        away = offloaded(config, own)
        parts = {"weights": own.weights, "gradients": own.gradients, "optimizer": own.optimizer}
        always = {
            **{part: size for part, size in parts.items() if part not in away},
            "engine's weights": own.engine,
            "engine's packed copies": _packed_elements(arch, grid) * device.engine_copies,
            "refit staging": staging_bytes(config, grid, own.engine if moved_bytes is None else moved_bytes),
            "reference": own.weights if device.is_host and algorithm.needs_reference else 0,
            "offload buffers": sum(away.values()) if device.is_host else 0,
            "context and communicators": device.allowance,
        }
        if algorithm.supervised and not config.train.eval_interval:
            always["refit staging"] = 0
        rows, cache = _kv_cache(found, device, own)
        kept = {} if config.rollout.free_cache_engine else {"KV cache": cache}
        used = shape.activations(stage)
        actor = {part: size for part, size in parts.items() if part in away}
        weights = {part: size for part, size in actor.items() if part == "weights"}
        phases = {
            "refit": {
                **weights,
                **always,
                **kept,
                "refit's casts and packing": _refit_moment(config, arch, grid, own, device),
            },
            "rollout": {**always, "KV cache": cache, **_generation(found, device, rows)},
            **({"score": {**weights, **always, **kept, "activations": used.scoring}} if scored else {}),
            "update": {**actor, **always, **kept, **_update(used)},
        }
        phases = {phase: {term: size for term, size in terms.items() if size} for phase, terms in phases.items()}
        host = 0
        if not device.is_host:
            host = sum(away.values()) + (2 * own.weights if algorithm.needs_reference else 0)
        stages.append(StageMemory(stage, stage * (grid.world_size // grid.pp), phases, rows, host))
    return stages


def offloaded(config: Config, own: Memory) -> dict[str, int]:
    """Parts of the actor that leave the device -> bytes of their copies in host memory (`megatron/offload.py`)."""
    copies = {
        "weights": (config.actor.param_offload, own.weights),
        "gradients": (config.actor.grad_offload, 0),
        "optimizer": (config.actor.optimizer_offload, own.optimizer),
    }
    return {part: size for part, (leaves, size) in copies.items() if leaves}


def staging_bytes(config: Config, grid: Grid, moved_bytes: int) -> int:
    """Buffers of a refit: two to send and two to receive, one of each where a single round does."""
    if grid.world_size == 1 or not moved_bytes:
        return 0
    bucket = config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    each = min(bucket, max(MIN_ROUND_BYTES, math.ceil(moved_bytes / PIPELINE_ROUNDS)))
    return min(2 * NUM_BUFFERS * each, 2 * moved_bytes)


def _refit_moment(config: Config, arch: ArchSpec, grid: Grid, own: Memory, device: Device) -> int:
    """A bucket in the engine's dtype where it is another; one matrix in the making."""
    stored = config.rollout.dtype or config.model.dtype
    cast = 0
    if stored != config.model.dtype:
        cast = min(own.engine, config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20)
    largest = max(arch.vocab_size, 2 * arch.intermediate_size) * arch.hidden_size // grid.rollout_tp
    return max(cast, largest * device.engine_copies)


def _update(used: Activations) -> dict[str, int]:
    """What a pass needs beside the weights; the output layer and the layers below it work one after the other."""
    if used.logits >= used.backward:
        return {"activations": used.saved, "logits": used.logits}
    return {"activations": used.saved, "backward of a layer": used.backward}


def _kv_cache(found: Resolved, device: Device, own: Memory) -> tuple[int, int]:
    """(sequences that have room, bytes), as the engine reserves them at the first rollout."""
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    if found.algorithm.supervised and not config.train.eval_interval:
        return 0, 0
    size = device.engine_copies or ITEM_BYTES[rollout.dtype or config.model.dtype]
    slots = math.ceil((rollout.prompt_length + rollout.response_length) / SLOT_MULTIPLE) * SLOT_MULTIPLE
    heads = max(1, arch.num_kv_heads // grid.rollout_tp)
    row_bytes = slots * 2 * arch.num_layers * heads * arch.head_dim * size
    if rollout.enable_rollout_routing_replay and arch.moe is not None:
        row_bytes += slots * arch.num_layers * arch.moe.top_k * ROUTED.itemsize
    prompts = math.ceil(config.train.batch_size / grid.num_replicas)
    rows = min(rollout.max_num_seqs, rollout.max_num_batched_tokens, prompts * rollout.n)
    if device.capacity is not None:
        copies = _packed_elements(arch, grid) * device.engine_copies
        away = offloaded(config, own)
        held = {"weights": own.weights, "gradients": own.gradients}
        free = device.capacity - device.allowance - own.engine - copies
        free -= sum(size for part, size in held.items() if part not in away)
        free -= _experts_work(arch, grid, rollout.max_num_batched_tokens)
        rows = min(rows, max(0, int(free * rollout.gpu_memory_utilization)) // row_bytes)
    return rows, max(1, rows) * row_bytes


def _experts_work(arch: ArchSpec, grid: Grid, tokens: int) -> int:
    """What the engine reckons with for its experts."""
    if arch.moe is None:
        return 0
    return work_bytes(tokens * arch.moe.top_k, arch.hidden_size, arch.moe.intermediate_size // grid.rollout_moe_tp)


def _generation(found: Resolved, device: Device, rows: int) -> dict[str, int]:
    """Logits of the running sequences, or hidden states of the prompts that are read."""
    config, arch, grid, rollout = found.config, found.arch, found.grid, found.config.rollout
    if not rows:
        return {}
    size = device.engine_copies or ITEM_BYTES[rollout.dtype or config.model.dtype]
    parts = 3 if grid.rollout_tp > 1 else 1  # this rank's, all ranks', and these put together
    logits = rows * arch.vocab_size * (parts * size + FP32_BYTES + (FP32_BYTES if size != FP32_BYTES else 0))
    prompts = math.ceil(config.train.batch_size / grid.num_replicas)
    tokens = min(rollout.max_num_batched_tokens, min(rows, prompts) * rollout.prompt_length)
    heads = (arch.num_heads + 2 * max(grid.rollout_tp, arch.num_kv_heads)) // grid.rollout_tp
    attention = 3 * heads * arch.head_dim
    if arch.moe is None:
        mlp = tokens * (3 * arch.intermediate_size // grid.rollout_tp) * size
    else:
        mlp = _experts_work(arch, grid, tokens)
    states = max(tokens * attention * size, mlp) + 3 * tokens * arch.hidden_size * size
    return {"logits of sampling": logits} if logits >= states else {"hidden states of prompts": states}


def _actor_elements(arch: ArchSpec, grid: Grid) -> list[tuple[int, int]]:
    """(elements, those of experts aside; elements of experts) of a rank of each stage."""
    layers = chunk_layers(arch, grid)
    sizes = _actor_parts(arch, grid.tp, grid.ep, grid.expert_tp)
    found = []
    for stage in range(grid.pp):
        count = sum(len(layers[stage, chunk]) for chunk in range(grid.vpp))
        first, last = stage == 0, stage == grid.pp - 1
        ends = (sizes.embedding if first else 0) + (sizes.end if last else 0)
        if last and not first and arch.tie_word_embeddings:
            ends += sizes.embedding  # the last stage's own copy
        found.append((count * sizes.layer + ends, count * sizes.experts))
    return found


@dataclass(frozen=True)
class _Parts:
    layer: int
    experts: int
    embedding: int
    end: int


@functools.cache
def _actor_parts(arch: ArchSpec, tp: int, ep: int, etp: int) -> _Parts:
    """Elements of a layer, of its experts, of the embedding, and of the final norm and output layer."""
    grid = Grid(math.lcm(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    layout = megatron_layout(replace(arch, num_layers=1), grid, 0, dtype="bfloat16", te=False)
    layer = {name: stored for name, stored in layout.items() if ".layers." in name}
    experts = {name: stored for name, stored in layer.items() if ".experts." in name}
    embedding = {name: stored for name, stored in layout.items() if ".embedding." in name}
    parts = [_num_elements(each) for each in (layer, experts, embedding, layout)]
    return _Parts(parts[0] - parts[1], parts[1], parts[2], parts[3] - parts[0] - parts[2])


@functools.cache
def _engine_elements(arch: ArchSpec, tp: int, ep: int) -> tuple[int, int]:
    """(elements of matrices that the engine multiplies with, other elements) of a rank."""
    layout = native_layout(replace(arch, num_layers=1), tp, 0, "bfloat16", ep_size=ep)
    matrices, others = 0, 0
    for name, stored in layout.items():
        count = math.prod(stored.shape) * (arch.num_layers if name.startswith("layers.") else 1)
        if len(stored.shape) == 2 and (name != "embed" or arch.tie_word_embeddings):
            matrices += count
        else:
            others += count
    return matrices, others


def _packed_elements(arch: ArchSpec, grid: Grid) -> int:
    return _engine_elements(arch, grid.rollout_tp, grid.rollout_ep)[0]


def _num_elements(layout: Layout) -> int:
    return sum(math.prod(stored.shape) for stored in layout.values())


def num_parameters(arch: ArchSpec) -> int:
    """Elements of the whole model, a tied embedding once."""
    sizes = _actor_parts(arch, 1, 1, 1)
    return arch.num_layers * (sizes.layer + sizes.experts) + sizes.embedding + sizes.end
