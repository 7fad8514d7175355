"""`mrl plan CONFIG --world-size N`: predicts the cost of a run on a cluster of any size, without running it.

This file makes the prediction and formats the report. Memory comes from `memory.py` and is checked by `fit.py`, times
come from `durations.py` and `weight_sync_cost.py`, the best split into training and sampling ranks from
`rank_split.py`. Everything is computed from shapes (`resharding/transfer_cost.py`) and the hardware's stated figures
(`observability/hardware.py`), and beside them from efficiencies that others published (`published.py`); nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.commands.launch import launch_argv
from mrl.commands.plan.durations import PhaseTime, phase_times
from mrl.commands.plan.fit import check_fits, device_of, format_overrides
from mrl.commands.plan.memory import (
    StageMemory,
    describe_adapters,
    not_counted,
    num_kv_rows,
    num_parameters,
)
from mrl.commands.plan.published import Published, PublishedSync
from mrl.commands.plan.rank_split import Splits, find_splits, splits_text
from mrl.commands.plan.response_lengths import ResponseLengths, expected_lengths
from mrl.commands.plan.undownloaded import with_notes, with_shapes
from mrl.commands.plan.weight_sync_cost import RefitPrediction, memory_with_refit, predict_refit
from mrl.commands.rehearse.placeholders import hint_at_placeholders
from mrl.config.config import Config
from mrl.engines._capabilities import engine_capabilities, memory_plan
from mrl.engines._memory_plan import Device
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import format_count
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.trainer.run_plan import Resolved, check_run
from mrl.trainer.validation.megatron import forced
from mrl.trainer.validation.rollout_ranks import key_of

GB = 1e9


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a run.

    Attributes:
        plan: Resolved config of the run.
        hardware: Figures of the cluster.
        stages: Memory of a rank of each stage.
        refit: Cost of a weight sync.
        phases: Durations of the phases of a step and of the step.
        lengths: Expected response lengths; None: full lengths.
        splits: Splits of the ranks; None: nothing is sampled.
        notes: Remarks for the user.
    """

    plan: Resolved
    hardware: Hardware
    stages: list[StageMemory]
    refit: RefitPrediction
    phases: list[PhaseTime]
    lengths: ResponseLengths | None
    splits: Splits | None
    notes: list[str]

    @property
    def device(self) -> Device:
        """Device of a rank."""
        return device_of(self.hardware, self.plan.grid)

    @property
    def overlaps(self) -> bool:
        """Whether sampling and training overlap."""
        return RolloutSchedule.of(self.plan.config).lead > 0


def predict(
    config: Config,
    world_size: int,
    hardware: Hardware,
    *,
    mean_length: int | None = None,
    metrics: Path | None = None,
    placeholders: bool = False,
) -> Prediction:
    """Predicts memory of a rank of each stage, duration of each phase, and the weight sync's traffic.

    Args:
        config: Config, not resolved.
        world_size: Number of ranks.
        hardware: Figures of the cluster.
        mean_length: Expected mean response length, tokens; None: full lengths, or those in `metrics`.
        metrics: metrics.jsonl or folder of a run, whose response lengths are expected.
        placeholders: Replace missing files by placeholders.

    Raises:
        UserError: The run is invalid or does not fit into memory; the message names a change that fits, and has the
            notes on replaced models.
    """
    config, notes = with_shapes(config, placeholders=placeholders)
    try:
        lengths = expected_lengths(config, mean_length, metrics)
        with hint_at_placeholders(config):
            found = check_run(config, world_size, tell=notes.append)
        refit = predict_refit(found.config, found.arch, found.grid, hardware)
        stages = check_memory(found, hardware, refit, lengths)
    except UserError as error:
        raise with_notes(error, notes) from error
    splits = None if found.algorithm.supervised else find_splits(found, hardware, refit, lengths)
    phases = phase_times(found, hardware, stages, refit, lengths)
    return Prediction(found, hardware, stages, refit, phases, lengths, splits, [*notes, *_megatron_notes(found)])


def describe(prediction: Prediction) -> str:
    """Returns the report as text."""
    found, refit, splits = prediction.plan, prediction.refit, prediction.splits
    return "\n".join(
        [
            *_layout(found, prediction.hardware),
            "",
            *_memory(prediction),
            "",
            *_times(prediction),
            "",
            *(_refit(refit) if found.needs_engine else ["no engine: nothing is sampled"]),
            *(() if splits is None else ["", *splits_text(splits, found.grid, overlaps=prediction.overlaps)]),
            *(f"\nnote: {note}" for note in prediction.notes),
        ]
    )


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Returns memory (bytes), times (s) and traffic (bytes) of the report, with the sources of published figures."""
    found, refit, total = prediction.plan, prediction.refit, prediction.refit.traffic.total
    return {
        "world_size": found.grid.world_size,
        "memory_bytes": [
            {
                "stage": stage.stage,
                "rank": stage.rank,
                "phases": stage.phases,
                "host": stage.host,
                "kv_sequences": stage.kv_rows,
            }
            for stage in prediction.stages
        ],
        "step_seconds": {
            phase.name: {
                "at_peak": phase.peak,
                "at_assumed_fractions": phase.assumed,
                "at_published_efficiency": phase.published,
                "published": [_published_json(one) for one in phase.sources],
            }
            for phase in prediction.phases
        },
        "weight_sync": {
            "local_bytes": total.local,
            "intra_node_bytes": total.intra_node,
            "inter_node_bytes": total.inter_node,
            "staging_bytes": refit.staging_bytes,
            "at_peak": refit.seconds,
            "at_published_rates": [
                {"seconds": seconds, **_published_json(sync)} for sync, seconds in refit.published.items()
            ],
        }
        if found.needs_engine
        else None,
        "notes": prediction.notes,
    }


def _published_json(one: Published | PublishedSync) -> dict[str, Any]:
    """Returns the figure, its measurement and its source."""
    figure = {"efficiency": one.efficiency} if isinstance(one, Published) else {"bytes_per_s": one.bytes_per_s}
    return {**figure, "measured": one.measured, "source": str(one.source)}


def check_memory(
    plan: Resolved, hardware: Hardware, refit: RefitPrediction, lengths: ResponseLengths | None = None
) -> list[StageMemory]:
    """Returns the memory of a rank of each stage, after checking that it fits; `mrl rehearse` checks the same.

    Raises:
        UserError: The run does not fit; the message names a change, or a split of the same ranks, that fits.
    """
    stages = memory_with_refit(plan, device_of(hardware, plan.grid), refit)
    try:
        check_fits(plan, hardware, stages)
    except UserError as error:
        raise _with_split(error, plan, hardware, refit, lengths) from error
    return stages


def _with_split(
    error: UserError, plan: Resolved, hardware: Hardware, refit: RefitPrediction, lengths: ResponseLengths | None
) -> UserError:
    """Returns the error with the fastest split of the same ranks that fits, if there is one."""
    if plan.algorithm.supervised:
        return error
    ranked = find_splits(plan, hardware, refit, lengths).ranked(overlaps=RolloutSchedule.of(plan.config).lead > 0)
    if not ranked:
        return error
    best = ranked[0]
    return UserError(
        f"{error} So does another split of the ranks, in which {best.description}: {format_overrides(best.overrides)}"
    )


def _layout(plan: Resolved, hardware: Hardware) -> Iterator[str]:
    arch, grid = plan.arch, plan.grid
    nodes = -(-grid.world_size // hardware.gpus_per_node)
    yield f"{format_count(grid.world_size, 'rank')} on {format_count(nodes, 'node')} of {hardware.gpus_per_node}"
    if grid.has_separate_rollout:
        train, sample = (f"{ranks.start}-{ranks.stop - 1}" for ranks in (grid.trainers, grid.samplers))
        yield f"roles     ranks {train} train, ranks {sample} only sample ({key_of(plan.config.rollout)})"
    mpi = engine_capabilities(plan.config.rollout.name).needs_mpi(plan.config.rollout)
    yield f"start     {launch_argv(grid.world_size, mpi=mpi)}"
    yield f"model     {num_parameters(arch) / GB:.2f} x 10^9 parameters, {plan.config.model.dtype}"
    if plan.config.actor.lora.rank:
        yield f"adapters  {describe_adapters(arch, plan.config.actor.lora)}"
    if plan.critic is not None:
        yield f"critic    {num_parameters(plan.critic) / GB:.2f} x 10^9 parameters, in the actor's layout"
    for teacher in plan.teachers:
        layers = "the student's layers" if teacher == arch else "layers of its own"
        yield f"teacher   {num_parameters(teacher) / GB:.2f} x 10^9 parameters, {layers}, in the actor's layout"
    if plan.reward is not None:
        yield f"reward    model of {num_parameters(plan.reward) / GB:.2f} x 10^9 parameters, in the actor's layout"
    yield f"actor     tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}" + (
        f", experts ep {grid.ep} x etp {grid.expert_tp}" if arch.moe else ""
    )
    stages = f" x pp {grid.rollout_pp}" if grid.rollout_pp > 1 else ""
    if not plan.needs_engine:
        return
    yield f"rollout   {grid.num_replicas} replica(s) of tp {grid.rollout_tp}{stages}" + (
        f", experts ep {grid.rollout_ep} x tp {grid.rollout_moe_tp}" if arch.moe else ""
    )


def _memory(prediction: Prediction) -> Iterator[str]:
    """Yields the fullest stage term by term and the other stages' totals; likewise for ranks that only sample."""
    plan, stages, device, lengths = prediction.plan, prediction.stages, prediction.device, prediction.lengths
    capacity = device.capacity or 0
    trainers = [stage for stage in stages if stage.stage is not None]
    yield (
        f"memory of a rank, GB, if every response has its full length; {capacity / GB:.1f} of "
        f"{prediction.hardware.memory_bytes / GB:.0f} GB can be filled"
    )
    yield from _terms(trainers)
    fullest = _fullest(trainers)
    if fullest.host:
        yield f"  host memory: {fullest.host / GB:.2f} GB for models and engine that are offloaded"
        sleeps = plan.config.rollout.free_cache_engine and not plan.grid.has_separate_rollout
        engine = memory_plan(plan.config)
        if plan.needs_engine and engine.discards_weights and sleeps:
            size = engine.weight_bytes(plan.config, plan.arch, plan.grid) / GB
            yield f"  of it {size:.2f} GB for the engine's weights, which {engine.discards_weights} discards instead"
        if fullest.replayed:
            yield f"  of it {fullest.replayed / GB:.2f} GB for the experts to replay"
    samplers = [stage for stage in stages if stage.stage is None]
    if samplers:
        yield from _terms(samplers)
        if samplers[0].host:
            yield f"  host memory: {samplers[0].host / GB:.2f} GB"
    if plan.needs_engine and (rows := num_kv_rows(stages)):
        yield f"  the KV cache has room for {rows} sequence(s) of {_longest(plan)} tokens in each replica"
        if lengths is not None:
            expected = lengths.decoded_rows(plan, device, rows)
            mean = f"{lengths.mean:.0f} tokens"
            yield f"  at the expected length, {mean}, a replica decodes {expected} sequence(s) at a time"


def _terms(stages: list[StageMemory]) -> Iterator[str]:
    fullest = _fullest(stages)
    phases = list(fullest.phases)
    yield f"  {_name_of(fullest):<26}" + "".join(f"{phase:>10}" for phase in phases)
    for term in dict.fromkeys(term for phase in phases for term in fullest.phases[phase]):
        sizes = (fullest.phases[phase].get(term) for phase in phases)
        yield f"  {term:<26}" + "".join(f"{'-' if size is None else f'{size / GB:.2f}':>10}" for size in sizes)
    for stage in stages:
        name = f"total, {_name_of(stage)}" if len(stages) > 1 else "total"
        yield f"  {name:<26}" + "".join(f"{stage.total(phase) / GB:>10.2f}" for phase in phases)


def _fullest(stages: list[StageMemory]) -> StageMemory:
    return max(stages, key=lambda stage: stage.total(stage.peak))


def _name_of(stage: StageMemory) -> str:
    return "a rank that samples" if stage.stage is None else f"stage {stage.stage}"


def _megatron_notes(plan: Resolved) -> Iterator[str]:
    """Yields notes on Megatron's own fields that the figures do not account for."""
    yield from forced(plan.config, plan.arch, plan.grid)
    if names := not_counted(plan.config):
        yield f"not counted: {', '.join(names)}"


def _longest(plan: Resolved) -> int:
    return plan.config.rollout.prompt_length + plan.config.rollout.response_length


def _times(prediction: Prediction) -> Iterator[str]:
    lengths = prediction.lengths
    responses = "if every response has its full length"
    if lengths is not None:
        responses = f"with responses of {lengths.mean:.0f} tokens on average and {lengths.longest} at most"
    yield f"a step, s, {responses}: at peak rates, at assumed fractions of them (--hardware), and at efficiencies that"
    yield "other systems published, which were not measured with mrl"
    yield f"  {'':<24} {'peak':>12} {'assumed':>12} {'published':>12}"
    for phase in prediction.phases:
        times = f"{phase.peak:12.4f} {phase.assumed:12.4f} {phase.published:12.4f}"
        yield f"  {phase.name:<24} {times}  {phase.note}".rstrip()
    sources = dict.fromkeys(one for phase in prediction.phases for one in phase.sources)
    for one in sources:
        figure = f"{one.efficiency:.0%}" if isinstance(one, Published) else f"{one.bytes_per_s / GB:.1f} GB/s"
        yield f"  published: {figure}: {one.measured}. {one.source}"


def _refit(refit: RefitPrediction) -> Iterator[str]:
    total = refit.traffic.total
    moved = total.intra_node + total.inter_node
    yield "refit, each time the weights change (bytes over all ranks)"
    yield f"  copied inside ranks      {total.local / GB:12.3f} GB"
    yield f"  sent inside nodes        {total.intra_node / GB:12.3f} GB"
    yield f"  sent between nodes       {total.inter_node / GB:12.3f} GB"
    yield f"  a gather of full tensors {refit.traffic.full_gather_bytes / GB:12.3f} GB" + (
        f", {refit.traffic.full_gather_bytes / moved:.1f} times what is sent" if moved else ""
    )
    yield f"  sent to a rank           {refit.received_bytes / GB:12.3f} GB at most"
    yield f"  staging of a rank        {refit.staging_bytes / GB:12.3f} GB at most"
    yield (
        f"  predicted time           {refit.seconds:12.4f} s from peak figures; bound {refit.bound_s:.4f} s, "
        f"full gather {refit.full_gather_s:.4f} s"
    )
    for sync, seconds in refit.published.items():
        what = "of the model" if sync.gathers else "into a rank"
        rate = f"{sync.bytes_per_s / GB:.1f} GB/s {what}"
        yield f"  at a published rate      {seconds:12.4f} s with {rate}: {sync.measured}. {sync.source}"
