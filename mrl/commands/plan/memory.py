"""Predicts the memory of a run: a rank of each pipeline stage, term by term and phase by phase.

`mrl plan` compares it with a device; `mrl train --dry-run` shows a part of it. Engines are in `engine_memory.py`,
activations in `activations.py`. Everything is computed from shapes; the caller passes an allowance for the rest
(context, communicators).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mrl.commands.plan import optimizer_memory, recompute
from mrl.commands.plan.activations import Activations, ActorShape
from mrl.commands.plan.engine_memory import engine_memory
from mrl.commands.plan.optimizer_memory import OptimizerMemory
from mrl.config.config import Config, LoraConfig
from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import FP32_BYTES, Device, EngineMemory
from mrl.models.base import ArchSpec, MoeSpec, layer_kinds
from mrl.models.transformer_engine import asked_for
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import lora
from mrl.resharding.buckets import MIN_ROUND_BYTES, NUM_BUFFERS, PIPELINE_ROUNDS
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.dtypes import expert_index_dtype
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import megatron_layout, padded_vocab, stage_layers, stage_moe_layers
from mrl.resharding.shards import counted_tensors
from mrl.trainer.run_plan import Resolved
from mrl.trainer.validation.critic import critic_config
from mrl.trainer.validation.distillation import is_frozen_actor
from mrl.trainer.validation.megatron import changes

GRADIENT_BYTES = 4
"""Bytes of a gradient in Megatron's buffer: fp32, or the weights' type without `megatron.ddp.grad_reduce_in_fp32`."""
REWARD = "the reward model's weights"
"""Term of the reward model's weights in the phase "reward"; otherwise they are in host memory."""
TEACHER_LOGITS = 4
"""Number of fp32 tensors per chunk of logits: log-probabilities of both sides, their difference, a product with it."""
NO_ENGINE = EngineMemory(held={}, cache=0, rows=0)
"""Engine of a rank that only trains."""
COUNTED = {
    *(("transformer", name) for name in recompute.FIELDS),
    ("ddp", "grad_reduce_in_fp32"),
    *(("optimizer", name) for name in optimizer_memory.FIELDS),
}
"""Fields of `megatron` that the prediction accounts for."""


@dataclass(frozen=True)
class Memory:
    """Permanent memory of a model on a rank, bytes.

    Attributes:
        weights: Weights of the model, and adapters.
        trained: Those of them that training changes: adapters, or without `actor.lora` all.
        gradients: Gradient buffer.
        states: Memory of the optimizer.
        engine: Weights of the rollout engine.
    """

    weights: int
    trained: int
    gradients: int
    states: OptimizerMemory
    engine: int

    @property
    def optimizer(self) -> int:
        """Optimizer state on the device, bytes."""
        return self.states.device

    @property
    def parts(self) -> dict[str, int]:
        """Part of a trained model -> bytes on the device."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}

    @property
    def total(self) -> int:
        """Sum of all parts and the engine's weights, bytes."""
        return self.weights + self.gradients + self.optimizer + self.engine


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of a pipeline stage, or of one that only samples.

    Attributes:
        stage: Pipeline stage, whose ranks have equal shards; None: ranks that only sample.
        rank: First rank of the stage.
        phases: Phase -> term -> bytes. Phases are "refit" and "rollout" with an engine, "score" for log-probabilities
            without training, "teacher" for teachers with layers of their own, "reward" with a reward model, "critic"
            with a critic, and "update".
        kv_rows: Number of sequences that fit into the KV cache.
        host: Bytes in host memory if the device is a GPU: offloaded parts, optimizer on the CPU, sleeping engine,
            reference, teachers and their hidden states, reward model, routing record, and copies for a checkpoint.
        replayed: Bytes of the routing record (router replay), which is always in host memory.
    """

    stage: int | None
    rank: int
    phases: dict[str, dict[str, int]]
    kv_rows: int
    host: int
    replayed: int

    def total(self, phase: str) -> int:
        """Returns the sum of all terms of a phase, bytes."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """Phase with the largest sum."""
        return max(self.phases, key=self.total)


def num_kv_rows(stages: Sequence[StageMemory]) -> int:
    """Returns the number of sequences that a replica decodes concurrently; 0 if nothing is sampled."""
    return min((stage.kv_rows for stage in stages if "rollout" in stage.phases), default=0)


def stage_memory(config: Config, arch: ArchSpec, grid: ParallelLayout) -> list[Memory]:
    """Returns the permanent memory of the actor on a rank of each pipeline stage, and its engine's weights."""
    in_fp32 = config.megatron.ddp.get("grad_reduce_in_fp32", True)
    dtype, item = trained_dtype(config), ITEM_BYTES[config.model.dtype]
    gradient_bytes = GRADIENT_BYTES if in_fp32 else ITEM_BYTES[dtype]
    sharded = config.actor.use_distributed_optimizer
    copies = grid.dp * grid.cp if sharded else 1
    expert_copies = len(grid.trainers) // (grid.pp * grid.ep * grid.expert_tp) if sharded else 1
    engine = (
        0 if arch.value_head else memory_plan(config).weight_bytes(config, arch, grid)
    )  # nothing is sampled from a critic
    found = []
    for all_elements, (dense, experts) in zip(
        _actor_elements(arch, grid), _trained_elements(config, arch, grid), strict=True
    ):
        owned = math.ceil(dense / copies), math.ceil(experts / expert_copies)
        trained = (dense + experts) * ITEM_BYTES[dtype]
        frozen = sum(all_elements) * item if config.actor.lora.rank else 0
        found.append(
            Memory(
                weights=frozen + trained,
                trained=trained,
                gradients=(dense + experts) * gradient_bytes,
                states=optimizer_memory.optimizer_memory(
                    config, dtype, owned=sum(owned), largest=max(owned), held=dense + experts
                ),
                engine=engine,
            )
        )
    return found


def memory_by_stage(plan: Resolved, device: Device, *, moved_bytes: int | None = None) -> list[StageMemory]:
    """Returns the memory of a rank of each pipeline stage, and of a rank that only samples, if there are such.

    Args:
        plan: Resolved config of the run.
        device: Device of a rank.
        moved_bytes: Most bytes that a rank sends or receives in a weight sync; None: the engine's weights, and for
            ranks that send to several engines a multiple of them.
    """
    config, arch, grid = plan.config, plan.arch, plan.grid
    shape = _actor_shape(plan, device)
    engine = memory_plan(config)
    arriving = engine.arriving_bytes(config, arch, grid) if moved_bytes is None else moved_bytes
    models = zip(
        stage_memory(config, arch, grid),
        _critics(plan, device),
        _teachers(plan, device),
        _reward_models(plan, device),
        strict=True,
    )
    stages = [
        _trainer(plan, device, stage, arriving, shape.activations(stage), own, others)
        for stage, (own, *others) in enumerate(models)
    ]
    return [*stages, _sampler(plan, device, arriving)] if grid.has_separate_rollout and plan.needs_engine else stages


@dataclass(frozen=True)
class _Holder:
    """Memory of one part of a run on a rank.

    Attributes:
        always: Term -> bytes on the device in every phase.
        phases: Phase -> term -> additional bytes on the device.
        host: Bytes in host memory; not counted if the device is the host.
    """

    always: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    host: int = 0

    def bytes_in(self, phase: str) -> dict[str, int]:
        return {**self.always, **self.phases.get(phase, {})}


def _phases(holders: Sequence[_Holder], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns phase -> term -> bytes, summed over the holders, without empty terms."""
    phases: dict[str, dict[str, int]] = {name: {} for name in names}
    for name, terms in phases.items():
        for holder in holders:
            for term, size in holder.bytes_in(name).items():
                if size:
                    terms[term] = terms.get(term, 0) + size
    return phases


def _offloaded_terms(terms: dict[str, int], device: Device) -> _Holder:
    """Returns a holder of offloaded terms: in host memory, or on a CPU always in the device's own memory."""
    return _Holder(always=terms) if device.is_host else _Holder(host=sum(terms.values()))


def _trainer(
    plan: Resolved,
    device: Device,
    stage: int,
    arriving: int,
    used: Activations,
    own: Memory,
    others: Sequence[Sequence[_Holder]],
) -> StageMemory:
    """Returns the memory of a rank that trains; `others` are the holders of critic, teachers and reward model."""
    config, grid, algorithm = plan.config, plan.grid, plan.algorithm
    samples = plan.needs_engine and not grid.has_separate_rollout
    moved = arriving if samples else arriving * math.ceil(len(grid.samplers) / len(grid.trainers))
    critic, teachers, reward = others
    actor, staying, away = _trained(config, grid, own, device)
    beside_engine = staying.get("weights", 0) + staying.get("gradients", 0)
    beside_engine += sum(critic[0].always.values()) if critic else 0
    engine = engine_memory(plan, device, weights=own.engine, actor=beside_engine) if samples else NO_ENGINE
    replayed = replayed_bytes(config, plan.arch, grid, stage)
    weights = {part: size for part, size in away.items() if part == "weights"}
    scoring = {"activations": used.scoring}
    holders = [
        _Holder(staying, {"refit": weights, "score": weights, "update": away}),
        _engine(
            engine,
            keeps_cache=not config.rollout.free_cache_engine,
            keeps_weights=sends_adapters(config) and not engine.host,
        ),
        _Holder(_engines_adapters(config, plan.arch, grid) if samples else {}),
        _Holder({"refit staging": staging_bytes(config, grid, moved) if plan.needs_engine else 0}),
        _offloaded_terms({"reference": own.trained if algorithm.needs_reference else 0}, device),
        _Holder(host=_swapped(plan, own)),
        *teachers,
        *reward,
        *critic,
        *actor,
        _Holder({"context and communicators": device.allowance}),
        _Holder(phases={"score": scoring, "teacher": scoring, "reward": scoring}),
        _Holder(phases={"update": _update(used, own.states.step)}),
        _Holder(phases={"update": {"experts to replay": replayed if device.is_host else 0}}, host=replayed),
    ]
    there = {
        "refit": plan.needs_engine,
        "rollout": samples,
        "score": any((algorithm.needs_reference, plan.scores_proximal, algorithm.needs_current, plan.teachers)),
        "teacher": any(teacher != plan.arch for teacher in plan.teachers),
        "reward": reward,
        "critic": critic,
        "update": True,
    }
    phases = _phases(holders, [phase for phase, is_there in there.items() if is_there])
    always = sum(size for holder in holders for size in holder.always.values())
    # both phases start with more of the actor on the device than they need, and then offload it
    at_start = {"refit": sum(away.values()), "rollout": sum(weights.values()) + sum(engine.awake.values())}
    for phase, size in at_start.items():
        if phase in phases and (excess := always + size - sum(phases[phase].values())) > 0:
            phases[phase]["actor, before offload"] = excess
    host = 0 if device.is_host else sum(holder.host for holder in holders)
    return StageMemory(stage, stage * len(grid.trainers) // grid.pp, phases, engine.rows, host, replayed)


def _stored_teachers(plan: Resolved) -> list[ArchSpec]:
    """Returns the teachers that have weights of their own."""
    configs = plan.config.distillation.teacher_models
    return [
        arch
        for teacher, arch in zip(configs, plan.teachers, strict=False)  # without distillation there are no teachers
        if not is_frozen_actor(plan.config, teacher)
    ]


def _swapped(plan: Resolved, own: Memory) -> int:
    """Returns the actor's weights that are in host memory while another model uses their place, bytes."""
    if plan.arch in _stored_teachers(plan):
        return own.weights
    return own.trained if plan.algorithm.needs_reference else 0


def _trained(
    config: Config, grid: ParallelLayout, own: Memory, device: Device
) -> tuple[list[_Holder], dict[str, int], dict[str, int]]:
    """Returns (holders of host copies, parts that stay on the device, offloaded parts) of a trained model."""
    host_copies = offloaded(config, own)
    holders = [
        _offloaded_terms({"offload buffers": sum(host_copies.values())}, device),
        _offloaded_terms({"copies for a checkpoint": checkpoint_copy_bytes(config, grid, own)}, device),
        _Holder(host=own.states.host),
    ]
    staying = {part: size for part, size in own.parts.items() if part not in host_copies}
    return holders, staying, {part: size for part, size in own.parts.items() if part in host_copies}


def _engines_adapters(config: Config, arch: ArchSpec, grid: ParallelLayout) -> dict[str, int]:
    """Returns the term of an engine's adapters: at most those of its experts and all others, bytes."""
    if not sends_adapters(config):
        return {}
    ep = grid.rollout_ep
    ((dense, experts),) = _trained_elements(config, arch, ParallelLayout(ep, ep=ep, etp=1))
    return {"engine's adapters": (dense + experts) * ITEM_BYTES[config.model.dtype]}


def _engine(engine: EngineMemory, *, keeps_cache: bool, keeps_weights: bool) -> _Holder:
    cache = {"KV cache": engine.cache}
    kept = {**(cache if keeps_cache else {}), **(engine.awake if keeps_weights else {})}
    return _Holder(
        always={**engine.held, **kept},
        phases={
            "refit": {**engine.awake, **engine.refit},
            "rollout": {**engine.awake, **cache, **engine.rollout},
            "reward": engine.awake,
        },
        host=0 if keeps_weights else engine.host,
    )


def _sampler(plan: Resolved, device: Device, arriving: int) -> StageMemory:
    """Returns the memory of a rank that only samples; its engine never sleeps."""
    grid = plan.grid
    config = replace(plan.config, rollout=replace(plan.config.rollout, free_cache_engine=False))
    weights = memory_plan(config).weight_bytes(config, plan.arch, grid)
    engine = engine_memory(replace(plan, config=config), device, weights=weights, actor=0)
    routing = routing_bytes(config, plan.arch, grid)
    holders = [
        _engine(engine, keeps_cache=True, keeps_weights=True),
        _Holder(_engines_adapters(config, plan.arch, grid)),
        _Holder({"refit staging": staging_bytes(config, grid, arriving)}),
        _Holder({"context and communicators": device.allowance}),
        _Holder(phases={"rollout": {"experts to replay": routing if device.is_host else 0}}, host=routing),
    ]
    phases = _phases(holders, ["refit", "rollout"])
    host = 0 if device.is_host else sum(holder.host for holder in holders)
    return StageMemory(None, grid.samplers.start, phases, engine.rows, host, 0 if device.is_host else routing)


def _actor_shape(plan: Resolved, device: Device) -> ActorShape:
    config = plan.config
    te = device.te and asked_for(config, plan.arch)
    compiled = device.is_host and device.compiles and not config.rollout.true_on_policy
    learns_from = plan.algorithm.learns_from
    return ActorShape(
        config, plan.arch, plan.grid, te=te, compiled=compiled, on_host=device.is_host, learns_from=learns_from
    )


def _critics(plan: Resolved, device: Device) -> list[list[_Holder]]:
    """Returns the critic's holders on a rank of each pipeline stage; the first one is its parts on the device."""
    grid = plan.grid
    if plan.critic is None:
        return [[] for _ in range(grid.pp)]
    config = critic_config(plan.config)
    te = device.te and asked_for(config, plan.critic)
    compiled = device.is_host and device.compiles
    shape = ActorShape(config, plan.critic, grid, te=te, compiled=compiled, on_host=device.is_host)
    stages = []
    borrows = config.actor.lora.rank > 0 and plan.config.critic.path is None  # the actor's frozen weights
    for stage, whole in enumerate(stage_memory(config, plan.critic, grid)):
        own = replace(whole, weights=whole.trained) if borrows else whole
        holders, staying, away = _trained(config, grid, own, device)
        terms = [{f"critic's {part}": size for part, size in parts.items()} for parts in (staying, away)]
        update = _update(shape.activations(stage), own.states.step)
        stages.append([_Holder(terms[0], {"critic": {**terms[1], **update}}), *holders])
    return stages


def _teachers(plan: Resolved, device: Device) -> list[list[_Holder]]:
    """Returns the teachers' holders on a rank of each pipeline stage.

    Weights and final hidden states (of a step's tokens, and a copy of a minibatch's) wait in host memory. A teacher
    that is the actor's frozen model needs no weights. A teacher with layers of its own is on the device while it runs.
    An update needs the output weights of all of them, and one chunk of both sides' logits.
    """
    config, grid, teachers = plan.config, plan.grid, plan.teachers
    item, train, stages = ITEM_BYTES[config.model.dtype], config.train, []
    stored = _stored_teachers(plan)
    elements = [_actor_elements(teacher, grid) for teacher in stored]
    for stage in range(grid.pp if teachers else 0):
        weights = [sum(each[stage]) * item for each in elements]
        states = output = 0
        if stage == grid.pp - 1 and not config.distillation.distillation_loss.is_sampled:
            samples = (train.batch_size + (train.minibatch_size or train.batch_size)) * config.rollout.n
            tokens = math.ceil(samples / grid.dp) * config.rollout.response_length
            states = tokens * max(teacher.hidden_size for teacher in teachers) * item
            rows = padded_vocab(plan.arch, grid.tp) // grid.tp
            output = sum(rows * teacher.hidden_size * item for teacher in teachers)
            output += TEACHER_LOGITS * FP32_BYTES * rows * min(config.actor.logprob_chunk_tokens, tokens)
        own_layers = (size for size, teacher in zip(weights, stored, strict=True) if teacher != plan.arch)
        running = {"a teacher's weights": max(own_layers, default=0)}
        stages.append(
            [
                _offloaded_terms({"teachers": sum(weights), "teachers' hidden states": states}, device),
                _Holder(phases={"teacher": running, "update": {"comparison with teachers": output}}),
            ]
        )
    return stages or [[] for _ in range(grid.pp)]


def _reward_models(plan: Resolved, device: Device) -> list[list[_Holder]]:
    """Returns the reward model's holders on a rank of each pipeline stage; none if it is not used."""
    unused = plan.algorithm.supervised and not plan.config.train.eval_interval
    if plan.reward is None or unused:
        return [[] for _ in range(plan.grid.pp)]
    item = ITEM_BYTES[plan.config.model.dtype]
    sizes = [sum(part) * item for part in _actor_elements(plan.reward, plan.grid)]
    return [
        [_offloaded_terms({"reward model": size}, device), _Holder(phases={"reward": {REWARD: size}})] for size in sizes
    ]


def not_counted(config: Config) -> list[str]:
    """Returns the fields of `megatron` that may change the memory but are not part of the prediction."""
    return [
        f"megatron.{section}.{name}"
        for section, name, _, _ in changes(config.megatron)
        if (section, name) not in COUNTED
    ]


def offloaded(config: Config, own: Memory) -> dict[str, int]:
    """Returns the offloaded parts of the actor -> bytes of their copies in host memory (`megatron/offload.py`)."""
    copies = {
        "weights": (config.actor.param_offload, own.weights),
        "gradients": (config.actor.grad_offload, 0),
        "optimizer": (config.actor.optimizer_offload, own.optimizer),
    }
    return {part: size for part, (is_offloaded, size) in copies.items() if is_offloaded}


def checkpoint_copy_bytes(config: Config, grid: ParallelLayout, own: Memory) -> int:
    """Returns the copies of a rank's shard for an asynchronous checkpoint, bytes; data-parallel ranks split it."""
    if not config.checkpoint.async_save:
        return 0
    writers = grid.dp * grid.cp
    saved = own.states.saved
    optimizer = saved if config.actor.use_distributed_optimizer else math.ceil(saved / writers)
    return math.ceil(own.trained / writers) + optimizer


def replayed_bytes(config: Config, arch: ArchSpec, grid: ParallelLayout, stage: int) -> int:
    """Returns the routing record on a rank of a stage, bytes, if every response has its full length.

    It has the samples of its data-parallel index in the stage's layers, twice those of a minibatch for the split into
    microbatches, and the engine's record (`routing_bytes`), if the rank has an engine.
    """
    samples = config.train.batch_size * config.rollout.n
    if config.actor.router_replay == "none" or arch.moe is None:
        return 0
    layers = len(stage_moe_layers(arch, grid)[stage])
    in_minibatch = (config.train.minibatch_size or config.train.batch_size) * config.rollout.n
    own = (math.ceil(samples / grid.dp) + 2 * math.ceil(in_minibatch / grid.dp)) * layers
    return own * _choice_bytes(config, arch.moe) + (
        0 if grid.has_separate_rollout else routing_bytes(config, arch, grid)
    )


def routing_bytes(config: Config, arch: ArchSpec, grid: ParallelLayout) -> int:
    """Returns the engine's routing record of all layers on the rank that sends a replica's samples, bytes."""
    if config.actor.router_replay != "rollout" or arch.moe is None:
        return 0
    samples = math.ceil(config.train.batch_size * config.rollout.n / grid.num_replicas)
    return samples * len(arch.moe_layers) * _choice_bytes(config, arch.moe)


def _choice_bytes(config: Config, moe: MoeSpec) -> int:
    """Returns the routing record of a sequence in one layer, bytes."""
    return config.rollout.max_sequence_length * moe.top_k * expert_index_dtype(moe.num_experts).itemsize


def staging_bytes(config: Config, grid: ParallelLayout, moved_bytes: int) -> int:
    """Returns the buffers of a weight sync, bytes: two to send and two to receive, or one of each for one round."""
    if grid.world_size == 1 or not moved_bytes:
        return 0
    bucket = config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    each = min(bucket, max(MIN_ROUND_BYTES, math.ceil(moved_bytes / PIPELINE_ROUNDS)))
    return min(2 * NUM_BUFFERS * each, 2 * moved_bytes)


def _update(used: Activations, step: int) -> dict[str, int]:
    """Returns the peak of a pass or of the optimizer step, whichever is more.

    The output layer and the layers below it run one after the other.
    """
    if step > used.saved + max(used.logits, used.backward):
        return {"step of the optimizer": step}
    if used.logits >= used.backward:
        return {"activations": used.saved, "logits": used.logits}
    return {"activations": used.saved, "backward of a layer": used.backward}


def _actor_elements(arch: ArchSpec, grid: ParallelLayout) -> list[tuple[int, int]]:
    """Returns (dense elements, expert elements) of a rank of each stage."""
    layers, experts = stage_layers(arch, grid), stage_moe_layers(arch, grid)
    sizes = _actor_parts(arch, grid.tp, grid.ep, grid.expert_tp)
    found = []
    for stage in range(grid.pp):
        with_experts = len(experts[stage])
        dense = sum(sizes.layers[layer in arch.moe_layers, layer in arch.linear_layers] for layer in layers[stage])
        first, last = stage == 0, stage == grid.pp - 1
        ends = (sizes.embedding if first else 0) + (sizes.end if last else 0)
        if last and not first and arch.tie_word_embeddings:
            ends += sizes.embedding  # the last stage's own copy
        found.append((dense + ends, with_experts * sizes.experts))
    return found


def trained_dtype(config: Config) -> str:
    """Returns the data type of the weights that are trained."""
    return (config.actor.lora.dtype if config.actor.lora.rank else None) or config.model.dtype


def sends_adapters(config: Config) -> bool:
    """Returns whether an engine keeps the model's weights, and weight syncs after the first send adapters only."""
    return config.actor.lora.rank > 0 and not config.actor.lora.merge


def selects_layers(settings: LoraConfig) -> bool:
    """Returns whether the layers of a model may have different adapters."""
    return any("layers." in name for name in (*settings.target_modules, *settings.exclude_modules))


def _trained_elements(config: Config, arch: ArchSpec, grid: ParallelLayout) -> list[tuple[int, int]]:
    """Returns (dense elements, expert elements) that a rank of each stage trains: its adapters, or all."""
    settings = config.actor.lora
    if not settings.rank:
        return _actor_elements(arch, grid)
    names, shared = (tuple(settings.target_modules), tuple(settings.exclude_modules)), settings.share_expert_adapters
    if selects_layers(settings):
        first_ranks = range(0, len(grid.trainers), len(grid.trainers) // grid.pp)
        return [_adapter_elements(arch, grid, rank, settings.rank, *names, shared) for rank in first_ranks]
    experts_ranks = math.lcm(grid.tp, grid.ep * grid.expert_tp)
    places = ParallelLayout(experts_ranks, tp=grid.tp, ep=grid.ep, etp=grid.expert_tp)
    kinds = {
        one.moe is not None: _adapter_elements(one, places, 0, settings.rank, *names, shared)
        for one, _ in layer_kinds(arch)
    }
    found = []
    for layers, with_experts in zip(stage_layers(arch, grid), stage_moe_layers(arch, grid), strict=True):
        each = [kinds[layer in with_experts] for layer in layers]
        found.append((sum(dense for dense, _ in each), sum(experts for _, experts in each)))
    return found


@functools.cache
def _adapter_elements(
    arch: ArchSpec,
    grid: ParallelLayout,
    rank: int,
    lora_rank: int,
    targets: tuple[str, ...],
    excluded: tuple[str, ...],
    shared: bool,
) -> tuple[int, int]:
    """Returns (dense elements, expert elements) of the adapters on a rank."""
    settings = LoraConfig(rank=lora_rank, target_modules=list(targets), exclude_modules=list(excluded))
    sizes, counted = [0, 0], set()
    for matrix in lora.adapted_matrices(arch, grid, rank, settings, dtype="bfloat16", te=False):
        name = lora.first_expert(matrix.weight) if shared else matrix.weight
        if name in counted:
            continue
        counted.add(name)
        both = math.prod(matrix.lora_a.shape) + math.prod(matrix.lora_b.shape)
        sizes[matrix.tensor.spec.kind.is_expert] += both
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class _Parts:
    layers: Mapping[tuple[bool, bool], int]
    experts: int
    embedding: int
    end: int


@functools.cache
def _actor_parts(arch: ArchSpec, tp: int, ep: int, etp: int) -> _Parts:
    """Returns the elements of a layer without its experts by kind, of experts, embedding, and final norm with head.

    A kind is (whether it has experts, whether its attention is linear).
    """
    grid = ParallelLayout(math.lcm(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    layers: dict[tuple[bool, bool], int] = {}
    experts = 0
    for one, _ in layer_kinds(arch):
        layout = megatron_layout(one, grid, 0, dtype="bfloat16", te=False)
        layer = {name: stored for name, stored in layout.items() if ".layers." in name}
        own = _num_elements({name: stored for name, stored in layer.items() if ".experts." in name})
        layers[one.moe is not None, one.linear_attention is not None] = _num_elements(layer) - own
        experts = max(experts, own)
        embedding = _num_elements({name: stored for name, stored in layout.items() if ".embedding." in name})
        end = _num_elements(layout) - _num_elements(layer) - embedding
    return _Parts(layers, experts, embedding, end)


def _num_elements(layout: Layout) -> int:
    return sum(math.prod(stored.shape) for stored in layout.values())


def num_parameters(arch: ArchSpec) -> int:
    """Returns the number of parameters of the model; a tied embedding counts once."""
    tensors = counted_tensors(arch, lambda one: hf_layout(one, "bfloat16"))
    return sum(math.prod(stored.shape) * count for _, stored, count in tensors)


def describe_adapters(arch: ArchSpec, settings: LoraConfig) -> str:
    """Describes the adapters of a model in words."""
    count = lora.num_parameters(arch, settings)
    share = count / num_parameters(arch)
    return f"{count:,} parameters of rank {settings.rank} are trained, {share:.3%} of the model's, which are frozen"
