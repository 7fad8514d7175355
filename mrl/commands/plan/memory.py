"""How much memory a run takes, before it runs: a rank of each pipeline stage, term by term and phase by phase.

Owns the sum: weights, gradients, optimizer, staging, what `engine_memory.py` says of the engine, and what
`activations.py` says of a pass. `mrl plan` compares it with a device, `mrl train --dry-run` shows a part of it.
Everything is arithmetic on shapes; what is no shape (context, communicators) is an allowance that the caller states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mrl.commands.plan import optimizer_memory, recompute
from mrl.commands.plan.activations import Activations, ActorShape
from mrl.commands.plan.critic_memory import CriticMemory
from mrl.commands.plan.engine_memory import Device, EngineMemory, engine_memory
from mrl.commands.plan.engine_weights import arriving_bytes, weight_bytes
from mrl.commands.plan.optimizer_memory import OptimizerMemory
from mrl.commands.plan.teacher_memory import TeacherMemory, teacher_memory
from mrl.config.config import Config
from mrl.models.base import ArchSpec, MoeSpec
from mrl.models.transformer_engine import asked_for
from mrl.parallel_layout import Grid
from mrl.resharding.buckets import MIN_ROUND_BYTES, NUM_BUFFERS, PIPELINE_ROUNDS
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.dtypes import choice_dtype
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import chunk_layers, megatron_layout, stage_layers
from mrl.trainer.resolve import Resolved
from mrl.trainer.validation.critic import critic_config
from mrl.trainer.validation.megatron import changes

GRADIENT_BYTES = 4
"""Megatron's gradient buffer is fp32, or of the parameters' type without `grad_reduce_in_fp32` in `megatron.ddp`."""
REWARD = "the reward model's weights"
"""While it scores; before and behind that they are in host memory."""
NO_ENGINE = EngineMemory(held={}, cache=0, rows=0)
"""On a rank that only trains."""
COUNTED = {
    *(("transformer", name) for name in recompute.FIELDS),
    ("ddp", "grad_reduce_in_fp32"),
    *(("optimizer", name) for name in optimizer_memory.FIELDS),
}
"""Fields of `megatron` that the prediction knows."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds all the time, by the shapes of its tensors; `states` says what the optimizer takes."""

    weights: int
    gradients: int
    states: OptimizerMemory
    engine: int

    @property
    def optimizer(self) -> int:
        """What the optimizer holds on the device."""
        return self.states.device

    @property
    def parts(self) -> dict[str, int]:
        """What a model to be trained has on the device."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.optimizer + self.engine


@dataclass(frozen=True)
class StageMemory:
    """What a rank of a pipeline stage holds, or one that only samples.

    Attributes:
        stage: Pipeline stage; its ranks hold equal shards. None: of the ranks that only sample.
        rank: The first of them.
        phases: "refit" and "rollout" where an engine samples, "score" where something is scored without training,
            "teacher" where one with layers of its own does, "reward" where there is a reward model, "critic" where
            there is one, "update" -> term -> bytes.
        kv_rows: Sequences that the KV cache has room for.
        host: Bytes in host memory beside the device: what was offloaded or is stepped there, an engine's weights while
            it sleeps, the reference, teachers and their hidden states, a reward model, the actor while it is away for
            them, the experts to replay, and copies for a checkpoint.
        replayed: Bytes of the experts to replay, which wait in host memory wherever the model is.
    """

    stage: int | None
    rank: int
    phases: dict[str, dict[str, int]]
    kv_rows: int
    host: int
    replayed: int

    def total(self, phase: str) -> int:
        """Bytes at the phase's peak."""
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)


def stage_memory(config: Config, arch: ArchSpec, grid: Grid) -> list[Memory]:
    """What a rank of each pipeline stage holds of weights, gradients and optimizer, and the weights of its engine."""
    in_fp32 = config.megatron.ddp.get("grad_reduce_in_fp32", True)
    gradient_bytes = GRADIENT_BYTES if in_fp32 else ITEM_BYTES[config.model.dtype]
    sharded = config.actor.use_distributed_optimizer
    copies = grid.dp * grid.cp if sharded else 1
    expert_copies = len(grid.trainers) // (grid.pp * grid.ep * grid.expert_tp) if sharded else 1
    engine = 0 if arch.value_head else weight_bytes(config, arch, grid)  # nothing is sampled from a critic
    found = []
    for dense, experts in _actor_elements(arch, grid):
        owned = math.ceil(dense / copies), math.ceil(experts / expert_copies)
        found.append(
            Memory(
                weights=(dense + experts) * ITEM_BYTES[config.model.dtype],
                gradients=(dense + experts) * gradient_bytes,
                states=optimizer_memory.optimizer_memory(
                    config, owned=sum(owned), largest=max(owned), held=dense + experts
                ),
                engine=engine,
            )
        )
    return found


def memory_by_stage(found: Resolved, device: Device, *, moved_bytes: int | None = None) -> list[StageMemory]:
    """Every phase of a run, on a rank of each pipeline stage; then on one that only samples, where there are such.

    Args:
        found: The run.
        device: Of a rank.
        moved_bytes: Most that a rank sends or gets in a refit; None: all that an engine gets, and of ranks that send
            to several engines so many times that.
    """
    config, arch, grid, algorithm = found.config, found.arch, found.grid, found.algorithm
    shape = _actor(found, device)
    held = stage_memory(config, arch, grid)
    scored = any((algorithm.needs_reference, found.scores_proximal, algorithm.needs_current, found.teachers))
    arriving = arriving_bytes(config, arch, grid) if moved_bytes is None else moved_bytes
    refits, samples = found.needs_engine, found.needs_engine and not grid.has_roles
    leaving = arriving if samples else arriving * math.ceil(len(grid.samplers) / len(grid.trainers))
    stages, critics, teachers, rewards = [], _critics(found, device), _teachers(found), _reward_models(found)
    for stage, (own, critic, teacher, reward) in enumerate(zip(held, critics, teachers, rewards, strict=True)):
        replayed = replayed_bytes(config, arch, grid, stage)
        away, parts = offloaded(config, own), own.parts
        staying = sum(parts[part] for part in ("weights", "gradients") if part not in away)
        staying += sum(critic.staying.values())
        engine = engine_memory(found, device, weights=own.engine, actor=staying) if samples else NO_ENGINE
        always = {
            **{part: size for part, size in parts.items() if part not in away},
            **engine.held,
            "refit staging": staging_bytes(config, grid, leaving) if refits else 0,
            "reference": own.weights if device.is_host and algorithm.needs_reference else 0,
            **(teacher.in_host if device.is_host else {}),
            "reward model": reward if device.is_host else 0,
            **critic.staying,
            "offload buffers": sum(away.values()) + critic.copies if device.is_host else 0,
            "copies for a checkpoint": commit_bytes(config, grid, own) + critic.saved if device.is_host else 0,
            "context and communicators": device.allowance,
        }
        kept = {} if config.rollout.free_cache_engine else {"KV cache": engine.cache}
        used = shape.activations(stage)
        actor = {part: size for part, size in parts.items() if part in away}
        weights = {part: size for part, size in actor.items() if part == "weights"}
        here = {**always, **kept}
        refit = {**weights, **always, **engine.awake, **kept, **engine.refit}
        rollout = {**always, **engine.awake, "KV cache": engine.cache, **engine.rollout}
        phases = {
            "refit": _begun(refit, {**actor, **here}),
            "rollout": _begun(rollout, {**weights, **here, **engine.awake}),
            **({"score": {**weights, **always, **kept, "activations": used.scoring}} if scored else {}),
            **({"teacher": {**here, **teacher.its_turn, "activations": used.scoring}} if teacher.turn else {}),
            **({"reward": {**here, **engine.awake, REWARD: reward, "activations": used.scoring}} if reward else {}),
            **({"critic": {**always, **kept, **critic.away, **critic.phase}} if critic.phase else {}),
            "update": {**actor, **always, **kept, **teacher.compared, **_update(used, own.states.step)},
        }
        phases["update"]["experts to replay"] = replayed if device.is_host else 0
        phases = _some(phases, without=[*([] if refits else ["refit"]), *([] if samples else ["rollout"])])
        host = 0
        if not device.is_host:
            host = sum(away.values()) + _sets_in_host(found, own) + sum(teacher.in_host.values()) + engine.host
            host += commit_bytes(config, grid, own) + own.states.host + replayed
            host += critic.copies + critic.saved + critic.host + reward
        stages.append(StageMemory(stage, stage * len(grid.trainers) // grid.pp, phases, engine.rows, host, replayed))
    return [*stages, _sampler(found, device, arriving)] if grid.has_roles and refits else stages


def _sampler(found: Resolved, device: Device, arriving: int) -> StageMemory:
    """A rank that only samples: its engine keeps its weights and its cache, for nobody else needs the room."""
    grid = found.grid
    config = replace(found.config, rollout=replace(found.config.rollout, free_cache_engine=False))
    engine = engine_memory(
        replace(found, config=config), device, weights=weight_bytes(config, found.arch, grid), actor=0
    )
    always = {
        **engine.held,
        **engine.awake,
        "KV cache": engine.cache,
        "refit staging": staging_bytes(config, grid, arriving),
        "context and communicators": device.allowance,
    }
    told = told_bytes(config, found.arch, grid)
    phases = {
        "refit": {**always, **engine.refit},
        "rollout": {**always, **engine.rollout, "experts to replay": told if device.is_host else 0},
    }
    host = 0 if device.is_host else engine.host + told
    return StageMemory(None, grid.samplers.start, _some(phases), engine.rows, host, 0 if device.is_host else told)


def _some(phases: dict[str, dict[str, int]], without: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """The other phases, each with its terms that are there."""
    return {
        phase: {term: size for term, size in terms.items() if size}
        for phase, terms in phases.items()
        if phase not in without
    }


def _actor(found: Resolved, device: Device) -> ActorShape:
    config = found.config
    te = device.te and asked_for(config)
    compiled = device.is_host and device.compiles and not config.rollout.true_on_policy
    learns_from = found.algorithm.learns_from
    return ActorShape(config, found.arch, found.grid, te=te, compiled=compiled, learns_from=learns_from)


def _critics(found: Resolved, device: Device) -> list[CriticMemory]:
    """Of a rank of each pipeline stage."""
    grid = found.grid
    if found.critic is None:
        return [CriticMemory()] * grid.pp
    config = critic_config(found.config)
    te = device.te and asked_for(config)
    shape = ActorShape(config, found.critic, grid, te=te, compiled=device.is_host and device.compiles)
    stages = []
    for stage, own in enumerate(stage_memory(config, found.critic, grid)):
        away, parts = offloaded(config, own), own.parts
        stages.append(
            CriticMemory(
                staying={f"critic's {part}": size for part, size in parts.items() if part not in away},
                away={f"critic's {part}": size for part, size in parts.items() if part in away},
                copies=sum(away.values()),
                phase=_update(shape.activations(stage), own.states.step),
                saved=commit_bytes(config, grid, own),
                host=own.states.host,
            )
        )
    return stages


def _sets_in_host(found: Resolved, own: Memory) -> int:
    """The reference's weights in host memory, and the actor's while the modules hold others than its own."""
    swapped = found.algorithm.needs_reference or found.arch in found.teachers
    return own.weights * (swapped + found.algorithm.needs_reference)


def _teachers(found: Resolved) -> list[TeacherMemory]:
    """Of a rank of each pipeline stage."""
    item, grid = ITEM_BYTES[found.config.model.dtype], found.grid
    sizes = [[sum(part) * item for part in _actor_elements(teacher, grid)] for teacher in found.teachers]
    return [teacher_memory(found, stage, [size[stage] for size in sizes]) for stage in range(grid.pp)]


def _reward_models(found: Resolved) -> list[int]:
    """Bytes of the reward model's weights on a rank of each pipeline stage; 0: there is none, or nothing is scored."""
    unused = found.algorithm.supervised and not found.config.train.eval_interval
    if found.reward is None or unused:
        return [0] * found.grid.pp
    item = ITEM_BYTES[found.config.model.dtype]
    return [sum(part) * item for part in _actor_elements(found.reward, found.grid)]


def not_counted(config: Config) -> list[str]:
    """Fields of `megatron` that may change the memory of a run, and are not in its prediction."""
    return [
        f"megatron.{section}.{name}"
        for section, name, _, _ in changes(config.megatron)
        if (section, name) not in COUNTED
    ]


def offloaded(config: Config, own: Memory) -> dict[str, int]:
    """Parts of the actor that leave the device -> bytes of their copies in host memory (`megatron/offload.py`)."""
    copies = {
        "weights": (config.actor.param_offload, own.weights),
        "gradients": (config.actor.grad_offload, 0),
        "optimizer": (config.actor.optimizer_offload, own.optimizer),
    }
    return {part: size for part, (leaves, size) in copies.items() if leaves}


def commit_bytes(config: Config, grid: Grid, own: Memory) -> int:
    """Copies of what a rank writes of a checkpoint beside the training; data-parallel ranks write in turns."""
    if not config.checkpoint.async_save:
        return 0
    writers = grid.dp * grid.cp
    saved = own.states.saved
    optimizer = saved if config.actor.use_distributed_optimizer else math.ceil(saved / writers)
    return math.ceil(own.weights / writers) + optimizer


def replayed_bytes(config: Config, arch: ArchSpec, grid: Grid, stage: int) -> int:
    """The experts to replay on a rank of a stage, if every response has its full length.

    Those of its data-parallel index's samples, in the layers of the stage; those of a minibatch twice more, as they are
    cut into microbatches; and the engine's (`told_bytes`), where the rank has one.
    """
    samples = config.train.batch_size * config.rollout.n
    if config.actor.router_replay == "none" or arch.moe is None:
        return 0
    in_minibatch = (config.train.minibatch_size or config.train.batch_size) * config.rollout.n
    own = (math.ceil(samples / grid.dp) + 2 * math.ceil(in_minibatch / grid.dp)) * len(stage_layers(arch, grid)[stage])
    return own * _choice_bytes(config, arch.moe) + (0 if grid.has_roles else told_bytes(config, arch, grid))


def told_bytes(config: Config, arch: ArchSpec, grid: Grid) -> int:
    """What an engine tells of its experts, of all layers, on the rank that sends a replica's samples on."""
    if config.actor.router_replay != "rollout" or arch.moe is None:
        return 0
    samples = math.ceil(config.train.batch_size * config.rollout.n / grid.num_replicas)
    return samples * arch.num_layers * _choice_bytes(config, arch.moe)


def _choice_bytes(config: Config, moe: MoeSpec) -> int:
    """Of a sequence in one layer."""
    return config.rollout.longest * moe.top_k * choice_dtype(moe.num_experts).itemsize


def staging_bytes(config: Config, grid: Grid, moved_bytes: int) -> int:
    """Buffers of a refit: two to send and two to receive, one of each where a single round does."""
    if grid.world_size == 1 or not moved_bytes:
        return 0
    bucket = config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    each = min(bucket, max(MIN_ROUND_BYTES, math.ceil(moved_bytes / PIPELINE_ROUNDS)))
    return min(2 * NUM_BUFFERS * each, 2 * moved_bytes)


def _begun(terms: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """A phase that first sends parts of the actor away: `before` is what is there until then, which may be more."""
    return {**terms, "actor, before it leaves": max(0, sum(before.values()) - sum(terms.values()))}


def _update(used: Activations, step: int) -> dict[str, int]:
    """What a pass or the step after it needs beside the weights, whichever is more.

    The output layer and the layers below it work one after the other.
    """
    if step > used.saved + max(used.logits, used.backward):
        return {"step of the optimizer": step}
    if used.logits >= used.backward:
        return {"activations": used.saved, "logits": used.logits}
    return {"activations": used.saved, "backward of a layer": used.backward}


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


def _num_elements(layout: Layout) -> int:
    return sum(math.prod(stored.shape) for stored in layout.values())


def num_parameters(arch: ArchSpec) -> int:
    """Elements of the whole model, a tied embedding once."""
    sizes = _actor_parts(arch, 1, 1, 1)
    return arch.num_layers * (sizes.layer + sizes.experts) + sizes.embedding + sizes.end
