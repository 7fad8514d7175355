"""Checks whether a run fits its GPUs and finds the smallest change that makes it fit.

A change is a set of overrides of the command line; one that validation would reject is not proposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mrl.commands.plan.memory import StageMemory, memory_by_stage
from mrl.config.config import Config
from mrl.engines._memory_plan import Device
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_plan import Resolved
from mrl.trainer.validation import validate
from mrl.trainer.validation.parallel import build_parallel_layout

GB = 1e9
MAX_CHANGES = 3
"""Largest number of settings that are combined, before the search becomes greedy."""
MAX_RANKS_FACTOR = 64
"""Largest multiple of the given number of ranks to try."""
MAX_REPLICA_NODES = 4
"""Largest rollout replica to propose, nodes."""
RECOMPUTE = ("none", "selective", "full")
UTILIZATIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BUCKETS_MIB = (1024, 512, 256)

Overrides = Mapping[str, Any]
"""Dotted config key -> value."""


@dataclass(frozen=True)
class Shortage:
    """Shortage of memory.

    Attributes:
        stage: Memory of the affected ranks.
        phase: Phase with the largest sum, or "rollout" if no sequence fits into the KV cache.
        missing: Bytes beyond the device's capacity.
    """

    stage: StageMemory
    phase: str
    missing: int


def device_of(hardware: Hardware, grid: ParallelLayout) -> Device:
    """Returns a GPU's usable memory and the allowance for context and communicators."""
    stage = len(grid.trainers) // grid.pp
    experts = (grid.ep, grid.expert_tp, stage // (grid.ep * grid.expert_tp)) if grid.ep * grid.expert_tp > 1 else ()
    sizes = (grid.world_size, grid.tp, grid.cp, grid.dp, grid.pp, grid.tp * grid.pp, grid.rollout_tp, *experts)
    allowance = hardware.context_bytes + sum(size > 1 for size in sizes) * hardware.communicator_bytes
    return Device(
        te=True,
        capacity=int(hardware.memory_bytes * hardware.memory_frac),
        allowance=int(allowance),
        total=hardware.memory_bytes,
        engine_allowance=int(hardware.engine_context_bytes),
    )


def shortage(stages: list[StageMemory], capacity: int) -> Shortage | None:
    """Returns the largest shortage of memory, None if everything fits.

    Args:
        stages: Memory of each stage.
        capacity: Usable memory of a device, bytes.
    """
    found = []
    for stage in stages:
        for phase in stage.phases:
            missing = stage.total(phase) - capacity
            if phase == "rollout" and "KV cache" in stage.phases[phase] and not stage.kv_rows:
                missing = max(missing, stage.phases[phase]["KV cache"])
            if missing > 0:
                found.append(Shortage(stage, phase, missing))
    return max(found, key=lambda one: one.missing, default=None)


def check_fits(plan: Resolved, hardware: Hardware, stages: list[StageMemory]) -> None:
    """Rejects a run that would run out of memory.

    Raises:
        UserError: The run does not fit; the message names the largest term and a change that fits.
    """
    device = device_of(hardware, plan.grid)
    capacity = device.capacity or 0
    short = shortage(stages, capacity)
    if short is None:
        return
    terms = sorted(short.stage.phases[short.phase].items(), key=lambda item: -item[1])
    where = describe_ranks(short.stage, plan.grid)
    if short.phase == "rollout" and not short.stage.kv_rows:
        problem = (
            f"{where} has no room for one sequence in its KV cache: the cache may take "
            f"rollout.gpu_memory_utilization={plan.config.rollout.gpu_memory_utilization} of the memory that is free "
            f"when the engine starts, and a sequence takes {short.stage.phases['rollout']['KV cache'] / GB:.2f} GB"
        )
    else:
        problem = (
            f"in {short.phase} {where} needs {short.stage.total(short.phase) / GB:.1f} GB; the largest term is "
            f"{terms[0][0]}, {terms[0][1] / GB:.1f} GB"
        )
    listed = ", ".join(f"{term} {size / GB:.2f}" for term, size in terms)
    raise UserError(
        f"the run does not fit GPUs of {hardware.memory_bytes / GB:g} GB, of which {capacity / GB:.4g} GB can be "
        f"used: {problem}. Terms, GB: {listed}. {_advice(plan, hardware)}"
    )


def describe_ranks(stage: StageMemory, grid: ParallelLayout) -> str:
    """Describes the ranks that a stage's memory belongs to."""
    if stage.stage is None:
        return "every rank that samples"
    if grid.pp > 1:
        return f"stage {stage.stage} (rank {stage.rank} and others)"
    return "every rank that trains" if grid.has_separate_rollout else "every rank"


def _advice(plan: Resolved, hardware: Hardware) -> str:
    change = smallest_change(plan, hardware)
    if change is not None:
        return f"This fits: {format_overrides(change)}"
    factor = 2
    while factor <= MAX_RANKS_FACTOR:
        more = plan.grid.world_size * factor
        larger = _changed(plan, {}, more)
        change = None if larger is None else smallest_change(larger, hardware)
        if change is not None:
            overrides = format_overrides(change)
            return (
                f"No layout of {plan.grid.world_size} ranks that was tried fits (not tried: fewer pipeline stages, or "
                f"stages of other sizes); this does: --world-size {more} {overrides}"
            )
        factor *= 2
    most = plan.grid.world_size * MAX_RANKS_FACTOR
    return f"No layout that was tried fits, of up to {most} ranks: shorten the sequences."


def format_overrides(change: Overrides) -> str:
    """Formats overrides for the command line."""
    return " ".join(
        f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for key, value in change.items()
    )


def smallest_change(plan: Resolved, hardware: Hardware) -> Overrides | None:
    """Returns overrides with which the run fits; {} if it already does, None if none were found.

    Tries each setting alone, then two and three together, cheap ones first. Then it changes settings one by one, each
    time the one that saves most.
    """
    start = _missing(plan, hardware)
    if start == 0:
        return {}
    useful: list[tuple[int, int, Overrides]] = []  # (knob, cost, overrides)
    for knob, alternatives in enumerate(_memory_options(plan.config, plan.grid, hardware)):
        for cost, overrides in enumerate(alternatives):
            other = _changed(plan, overrides)
            if other is None:
                continue
            missing = _missing(other, hardware)
            if missing == 0:
                return overrides
            if missing < start:
                useful.append((knob, cost, overrides))
    for count in range(2, MAX_CHANGES + 1):
        combinations = [
            parts for parts in itertools.combinations(useful, count) if len({knob for knob, _, _ in parts}) == count
        ]
        for parts in sorted(combinations, key=lambda parts: sum(knob + cost for knob, cost, _ in parts)):
            overrides = {key: value for _, _, part in parts for key, value in part.items()}
            other = _changed(plan, overrides)
            if other is not None and _missing(other, hardware) == 0:
                return overrides
    return _greedy_change(plan, hardware)


def _greedy_change(plan: Resolved, hardware: Hardware) -> Overrides | None:
    total: dict[str, Any] = {}
    missing = _missing(plan, hardware)
    while missing:
        best: tuple[int, Overrides, Resolved] | None = None
        for overrides in itertools.chain(*_memory_options(plan.config, plan.grid, hardware)):
            other = _changed(plan, overrides)
            left = None if other is None else _missing(other, hardware)
            if other is not None and left is not None and left < (missing if best is None else best[0]):
                best = (left, overrides, other)
        if best is None:
            return None
        missing, overrides, plan = best
        total |= overrides
    return total


def _missing(plan: Resolved, hardware: Hardware) -> int:
    """Returns the missing bytes of the worst stage of each phase, summed over phases."""
    device = device_of(hardware, plan.grid)
    stages = memory_by_stage(plan, device)
    capacity = device.capacity or 0
    phases = dict.fromkeys(phase for stage in stages for phase in stage.phases)
    missing = sum(
        max(0, *(stage.total(phase) - capacity for stage in stages if phase in stage.phases)) for phase in phases
    )
    for stage in stages:
        if not stage.kv_rows:
            missing += stage.phases.get("rollout", {}).get("KV cache", 0)
    return missing


def _memory_options(config: Config, grid: ParallelLayout, hardware: Hardware) -> Iterator[list[Overrides]]:
    """Yields settings that save memory, cheap ones first; each with its alternatives, small changes first."""
    actor, rollout, parallel = config.actor, config.rollout, config.parallel
    if not rollout.free_cache_engine:
        yield [{"rollout.free_cache_engine": True}]
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes
    key = "rollout.checkpoint_engine.update_weights_bucket_megabytes"
    yield [{key: size} for size in BUCKETS_MIB if size < bucket]
    used = rollout.gpu_memory_utilization
    nearest = sorted((part for part in UTILIZATIONS if part != used), key=lambda part: abs(part - used))
    yield [{"rollout.gpu_memory_utilization": part} for part in nearest]
    if not actor.use_distributed_optimizer and grid.dp > 1:
        yield [{"actor.use_distributed_optimizer": True}]
    if grid.tp > 1 and not parallel.sequence_parallel:
        yield [{"parallel.sequence_parallel": True}]
    offloads = ("actor.grad_offload", "actor.optimizer_offload", "actor.param_offload")
    if not (actor.grad_offload and actor.optimizer_offload and actor.param_offload):
        yield [dict.fromkeys(offloads[:count], True) for count in (1, 2, 3)]
    yield [{"actor.recompute": name} for name in RECOMPUTE[RECOMPUTE.index(actor.recompute) + 1 :]]
    longest = config.rollout.max_sequence_length
    smaller = (actor.max_tokens_per_microbatch // part for part in (2, 4, 8))
    yield [{"actor.max_tokens_per_microbatch": size} for size in smaller if size >= longest]
    wider = [2**power for power in range(1, 8)]
    yield [
        {
            "rollout.tensor_model_parallel_size": grid.rollout_tp * factor,
            **({"rollout.expert_parallel_size": grid.rollout_ep * factor} if grid.rollout_ep > 1 else {}),
        }
        for factor in wider
        if grid.rollout_tp * factor <= MAX_REPLICA_NODES * hardware.gpus_per_node
    ]
    yield [
        {"parallel.tensor_model_parallel_size": grid.tp * factor, "parallel.sequence_parallel": True}
        for factor in wider
        if grid.tp * factor <= hardware.gpus_per_node
    ]
    yield [
        {"parallel.expert_model_parallel_size": grid.ep * factor, "parallel.expert_tensor_parallel_size": 1}
        for factor in wider
    ]
    uneven = ("parallel.num_layers_in_first_pipeline_stage", "parallel.num_layers_in_last_pipeline_stage")
    given = (grid.first_stage_layers, grid.last_stage_layers)
    even = {key: None for key, value in zip(uneven, given, strict=True) if value is not None}
    yield [{"parallel.pipeline_model_parallel_size": grid.pp * factor, **even} for factor in wider]


def with_overrides(plan: Resolved, overrides: Overrides, world_size: int | None = None) -> Resolved:
    """Returns the run with other settings.

    Args:
        plan: Resolved config of the run.
        overrides: Settings to change.
        world_size: Number of ranks; None: unchanged.

    Raises:
        UserError: Validation rejects the changed config.
    """
    config = plan.config
    for key, value in overrides.items():
        config = _with(config, key.split("."), value)
    ranks = world_size or plan.grid.world_size
    validate.check(config, plan.arch, ranks, plan.tokenizer.vocab_size, learns_from=plan.algorithm.learns_from)
    own = {item.name: getattr(plan, item.name) for item in fields(Resolved)}
    return Resolved(**{**own, "config": config, "grid": build_parallel_layout(config, ranks)})


def _changed(plan: Resolved, overrides: Overrides, world_size: int | None = None) -> Resolved | None:
    """Returns the run with other settings, None if validation rejects it."""
    try:
        return with_overrides(plan, overrides, world_size)
    except UserError:
        return None


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return replace(section, **{path[0]: inner})
