"""`mrl plan CONFIG --world-size N`: predicts the cost of a run on a cluster of any size, without running it.

This file formats the report. Memory comes from `memory.py` and is checked by `fit.py`, times come from `durations.py`
and `weight_sync_cost.py`, the best split into training and sampling ranks from `rank_split.py`. Everything is computed
from shapes (`resharding/transfer_cost.py`) and the hardware's stated figures (`observability/hardware.py`); nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.commands.launch import launch_argv
from mrl.commands.plan.durations import Durations, predict_step, step_time
from mrl.commands.plan.fit import check_fits, device_of, format_overrides
from mrl.commands.plan.memory import (
    StageMemory,
    describe_adapters,
    memory_by_stage,
    not_counted,
    num_kv_rows,
    num_parameters,
)
from mrl.commands.plan.rank_split import Splits, find_splits, splits_text
from mrl.commands.plan.response_lengths import ResponseLengths, expected_lengths
from mrl.commands.plan.undownloaded import with_shapes
from mrl.commands.plan.weight_sync_cost import PUBLISHED_RATE, RefitPrediction, predict_refit
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


def describe(
    config: Config, world_size: int, hardware: Hardware, *, mean_length: int | None = None, metrics: Path | None = None
) -> str:
    """Returns the report: memory of a rank of each stage, duration of each phase, and the weight sync's traffic.

    Args:
        config: Config, not resolved.
        world_size: Number of ranks.
        hardware: Figures of the cluster.
        mean_length: Expected mean response length, tokens; None: full lengths, or those in `metrics`.
        metrics: metrics.jsonl or folder of a run, whose response lengths are expected.

    Raises:
        UserError: The run is invalid or does not fit into memory; the message names a change that fits.
    """
    config, notes = with_shapes(config)
    lengths = expected_lengths(config, mean_length, metrics)
    found = check_run(config, world_size, tell=notes.append)
    device = device_of(hardware, found.grid)
    refit = predict_refit(found.config, found.arch, found.grid, hardware)
    # a rank may send more than it receives: the upper bound is all of an engine's weights
    stages = memory_by_stage(found, device, moved_bytes=None if refit.staging_bytes else 0)
    splits, overlaps = None, RolloutSchedule.of(found.config).lead > 0
    if not found.algorithm.supervised:
        splits = find_splits(found, hardware, refit, lengths)
    try:
        check_fits(found, hardware, stages)
    except UserError as error:
        raise _with_split(error, splits, overlaps=overlaps) from error
    return "\n".join(
        [
            *_layout(found, hardware),
            "",
            *_memory(found, stages, device, hardware, lengths),
            "",
            *_times(found, hardware, refit, predict_step(found, hardware, stages, lengths), lengths, overlaps=overlaps),
            "",
            *(_refit(refit) if found.needs_engine else ["no engine: nothing is sampled"]),
            *(() if splits is None else ["", *splits_text(splits, found.grid, overlaps=overlaps)]),
            *(f"\nnote: {note}" for note in [*notes, *_megatron_notes(found)]),
        ]
    )


def _with_split(error: UserError, splits: Splits | None, *, overlaps: bool) -> UserError:
    """Returns the error with the fastest split of the same ranks that fits, if there is one."""
    ranked = [] if splits is None else splits.ranked(overlaps=overlaps)
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


def _memory(
    plan: Resolved, stages: list[StageMemory], device: Device, hardware: Hardware, lengths: ResponseLengths | None
) -> Iterator[str]:
    """Yields the fullest stage term by term and the other stages' totals; likewise for ranks that only sample."""
    capacity = device.capacity or 0
    trainers = [stage for stage in stages if stage.stage is not None]
    yield (
        f"memory of a rank, GB, if every response has its full length; {capacity / GB:.1f} of "
        f"{hardware.memory_bytes / GB:.0f} GB can be filled"
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


def _times(
    plan: Resolved,
    hardware: Hardware,
    refit: RefitPrediction,
    times: Durations,
    lengths: ResponseLengths | None,
    *,
    overlaps: bool,
) -> Iterator[str]:
    responses = "if every response has its full length"
    if lengths is not None:
        responses = f"with responses of {lengths.mean:.0f} tokens on average and {lengths.longest} at most"
    yield f"a step, s, {responses}, at assumed fractions of the peak rates (--hardware)"
    rows = [] if plan.algorithm.supervised else [("refit", refit.seconds, "links and memory at their peak")]
    if times.decode_steps:
        assumed = f"{hardware.decode_frac:.0%} of memory and FLOP rate"
        note = f"{times.decode_steps:,} passes, bound by {times.bound_by}; {assumed}"
        rows += [("rollout, prompts", times.prefill, f"{hardware.prefill_flops_frac:.0%} of {_rate(hardware)}")]
        rows += [("rollout, responses", times.decode, note)]
    if times.score:
        rows += [("score", times.score, f"{hardware.train_flops_frac:.0%} of {_rate(hardware)}")]
    bubble = f", {times.bubble_frac:.0%} pipeline bubble" if times.bubble_frac else ""
    rows += [("update", times.update, f"{hardware.train_flops_frac:.0%} of {_rate(hardware)}{bubble}")]
    refit_s = 0.0 if plan.algorithm.supervised else refit.seconds
    total, note = step_time(times, refit_s, has_roles=plan.grid.has_separate_rollout, overlaps=overlaps), ""
    if plan.grid.has_separate_rollout:
        note = "rollouts and training at the same time; " if overlaps else ""
        note += f"ranks that train wait {total.idle_trainers:.0%} of it, those that sample {total.idle_samplers:.0%}"
    rows += [("total", total.step, note)]
    for name, seconds, note in rows:
        yield f"  {name:<24} {seconds:12.4f}  {note}".rstrip()


def _rate(hardware: Hardware) -> str:
    return f"{hardware.bf16_flops / 1e12:.0f} TFLOP/s"


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
    if (measured := refit.seconds_at_published_rate) is not None:
        yield (
            f"  at a measured rate       {measured:12.4f} s with {PUBLISHED_RATE / GB:.1f} GB/s into a rank, "
            "Perplexity's for Kimi-K2 (research.perplexity.ai)"
        )
