"""Finds the fastest split of a job's ranks into those that train and those that sample, and describes the result.

A split is the same config with another number of sampling ranks; layouts and everything else are unchanged. Its
duration and memory are predicted by `durations.py`, `weight_sync_cost.py` and `memory.py`, as for a config with that
split.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mrl.commands.plan.durations import Durations, StepTime, predict_step, step_time
from mrl.commands.plan.fit import Overrides, describe_ranks, device_of, format_overrides, shortage, with_overrides
from mrl.commands.plan.memory import StageMemory
from mrl.commands.plan.response_lengths import ResponseLengths
from mrl.commands.plan.weight_sync_cost import RefitPrediction, memory_with_refit, predict_refit
from mrl.config.config import RolloutConfig
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import format_count
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_plan import Resolved

TIMED_RANKS = 1 << 13
"""Limit of splits x ranks whose weight sync is predicted even though they cannot be the fastest."""
MAX_ROWS = 10
"""Number of splits shown."""
GB = 1e9


@dataclass
class Split:
    """A split of the ranks that fits into memory; or all ranks both train and sample.

    Attributes:
        plan: Resolved config with this split.
        overrides: Overrides that turn the given config into this split.
        hardware: Figures of the cluster.
        stages: Memory of each stage.
        durations: Durations of the phases.
        known: Cost of the weight sync, if already predicted.
    """

    plan: Resolved
    overrides: Overrides
    hardware: Hardware
    stages: list[StageMemory]
    durations: Durations
    known: RefitPrediction | None = None

    @property
    def grid(self) -> ParallelLayout:
        """Parallel layout of all ranks."""
        return self.plan.grid

    @cached_property
    def refit(self) -> RefitPrediction:
        """Cost of the weight sync; its prediction takes longer than all others."""
        return self.known or predict_refit(self.plan.config, self.plan.arch, self.grid, self.hardware)

    def step(self, *, overlaps: bool) -> StepTime:
        """Returns the duration of a step."""
        return step_time(
            self.durations, self.refit.seconds, has_roles=self.grid.has_separate_rollout, overlaps=overlaps
        )

    def step_lower_bound(self, *, overlaps: bool) -> float:
        """Returns the duration of a step without its weight sync, s, a lower bound."""
        return step_time(self.durations, 0.0, has_roles=self.grid.has_separate_rollout, overlaps=overlaps).step

    @property
    def description(self) -> str:
        """Number of ranks that train and that sample, in words."""
        grid = self.grid
        if not grid.has_separate_rollout:
            return f"all {grid.world_size} ranks train and sample alternately"
        return f"{format_count(len(grid.trainers), 'rank')} train and {len(grid.samplers)} sample"


@dataclass(frozen=True)
class Splits:
    """All splits of a run's ranks.

    Attributes:
        fitting: Valid splits that fit into memory.
        left_out: Reason -> number of splits that are excluded by it.
    """

    fitting: list[Split]
    left_out: Counter[str]

    def ranked(self, *, overlaps: bool) -> list[Split]:
        """Returns the splits, fastest first; in large jobs only those that can be among the fastest.

        A split that is slower without its weight sync than another one with it is not timed.
        """
        order = sorted(self.fitting, key=lambda split: split.step_lower_bound(overlaps=overlaps))
        timed: list[Split] = []
        best = math.inf
        for split in order:
            few = (len(timed) + 1) * split.grid.world_size <= TIMED_RANKS
            if not few and split.step_lower_bound(overlaps=overlaps) >= best:
                break
            timed.append(split)
            best = min(best, split.step(overlaps=overlaps).step)
        return sorted(timed, key=lambda split: split.step(overlaps=overlaps).step)


def find_splits(
    plan: Resolved,
    hardware: Hardware,
    refit: RefitPrediction | None = None,
    lengths: ResponseLengths | None = None,
) -> Splits:
    """Evaluates all splits of the run's ranks, including its own and the one in which all ranks do both.

    Args:
        plan: Resolved config of the run, which samples.
        hardware: Figures of the cluster.
        refit: Cost of the run's own weight sync, if known.
        lengths: Expected response lengths; None: full lengths.
    """
    fitting: list[Split] = []
    left_out: Counter[str] = Counter()
    for samplers in range(plan.grid.world_size):
        overrides = _overrides(plan.config.rollout, samplers)
        try:
            other = with_overrides(plan, overrides)
            capabilities = engine_capabilities(other.config.rollout.name)
            if capabilities.needs_mpi(other.config.rollout):
                capabilities.check_hosts(other.grid, hardware.gpus_per_node)
        except UserError as error:
            left_out[_exclusion_reason(str(error))] += 1
            continue
        device = device_of(hardware, other.grid)
        known = refit if other.grid == plan.grid else None
        stages = memory_with_refit(other, device, known)
        short = shortage(stages, device.capacity or 0)
        if short is not None:
            left_out[f"{describe_ranks(short.stage, other.grid)} lacks memory in its {short.phase}"] += 1
            continue
        durations = predict_step(other, hardware, stages, lengths)
        fitting.append(Split(other, _differing(plan, overrides), hardware, stages, durations, known))
    return Splits(fitting, left_out)


def _overrides(rollout: RolloutConfig, samplers: int) -> dict[str, Any]:
    """Returns the overrides for a number of sampling ranks, in nodes if the config uses nodes."""
    per_node = rollout.n_gpus_per_node
    if rollout.nnodes and samplers and samplers % per_node == 0:
        return {"rollout.num_ranks": 0, "rollout.nnodes": samplers // per_node}
    return {
        "rollout.num_ranks": samplers,
        "rollout.nnodes": 0,
        "rollout.n_gpus_per_node": RolloutConfig.n_gpus_per_node,
    }


def _differing(plan: Resolved, overrides: dict[str, Any]) -> Overrides:
    rollout = plan.config.rollout
    return {key: value for key, value in overrides.items() if getattr(rollout, key.rpartition(".")[2]) != value}


NUMBER = re.compile(r"\d+( to \d+)?")
KINDS = {
    "does not divide the # rank(s) of this job": "ranks that train are no multiple of the actor's layout",
    "does not divide the # rank(s) of a pipeline stage": "the experts' layout does not divide a pipeline stage",
    "rank(s) of this job that sample": "ranks that sample are no multiple of a replica",
    "TensorRT-LLM needs a replica inside": "a replica would lie across nodes, which TensorRT-LLM does not take",
    "some ranks would never train": "a minibatch is smaller than the data-parallel size",
}
"""Part of a validation error, numbers replaced by # -> reason in the report."""


def _exclusion_reason(message: str) -> str:
    """Returns a reason that is equal for all splits with the same kind of error."""
    plain = NUMBER.sub("#", message)
    known = [reason for part, reason in KINDS.items() if part in plain]
    return known[-1] if known else plain.splitlines()[0].partition(". ")[0].replace("#", "N")


# words ----------------------------------------------------------------------------------------------------------------


def splits_text(splits: Splits, own: ParallelLayout, *, overlaps: bool) -> Iterator[str]:
    """Yields the table of splits, the best one, and the reason."""
    ranked = splits.ranked(overlaps=overlaps)
    yield (
        f"splits of {format_count(own.world_size, 'rank')} into those that train and those that sample, s a step, "
        f"{'both at the same time' if overlaps else 'one after the other (train.mode=sync)'}"
    )
    yield (
        f"  {'train':>7}{'sample':>8}{'refit':>9}{'rollout':>10}{'training':>10}{'step':>10}"
        f"{'train waits':>13}{'sample waits':>14}  GB of a rank that trains, samples"
    )
    for number, split in enumerate(ranked):
        if number < MAX_ROWS or split.grid == own:
            yield _row(split, own, best=number == 0, overlaps=overlaps)
    slower = len(splits.fitting) - min(len(ranked), MAX_ROWS)
    if slower > 0:
        yield f"  and {format_count(slower, 'slower split')}"
    if splits.left_out:
        yield f"  left out: {_reasons(splits)}"
    yield f"  best: {explain_fastest(ranked, overlaps=overlaps)}"
    if not overlaps and any(split.grid.has_separate_rollout for split in splits.fitting):
        yield f"  best with train.mode=async: {explain_fastest(splits.ranked(overlaps=True), overlaps=True)}"


def _row(split: Split, own: ParallelLayout, *, best: bool, overlaps: bool) -> str:
    grid, step = split.grid, split.step(overlaps=overlaps)
    mark = "*" if best else " "
    marker = "  this config" if grid == own else ""
    sizes = [max((stage.total(stage.peak) for stage in part), default=0) for part in _sides(split)]
    samples = str(len(grid.samplers)) if grid.has_separate_rollout else "same"
    waits = [f"{idle:.0%}" if grid.has_separate_rollout else "-" for idle in (step.idle_trainers, step.idle_samplers)]
    memory = ", ".join(f"{size / GB:.0f}" for size in sizes if size)
    return (
        f"{mark:>2}{len(grid.trainers):>7}{samples:>8}{step.refit:>9.3f}{step.rollouts:>10.2f}{step.training:>10.2f}"
        f"{step.step:>10.2f}{waits[0]:>13}{waits[1]:>14}  {memory}{marker}"
    )


def _sides(split: Split) -> tuple[list[StageMemory], list[StageMemory]]:
    """Returns the memory of training ranks and of ranks that only sample."""
    samplers = [stage for stage in split.stages if stage.stage is None]
    return [stage for stage in split.stages if stage.stage is not None], samplers


def _reasons(splits: Splits) -> str:
    return "; ".join(f"{format_count(count, 'split')}: {why}" for why, count in splits.left_out.most_common())


def explain_fastest(ranked: list[Split], *, overlaps: bool) -> str:
    """Describes the fastest split and the reason.

    Args:
        ranked: Splits, fastest first.
        overlaps: Sampling and training ranks work concurrently, as in the ranking.
    """
    best, others = ranked[0], ranked[1:]
    step = best.step(overlaps=overlaps)
    keys = f" ({format_overrides(best.overrides)})" if best.overrides else ", as the config has it"
    sentences = [f"{best.description}{keys}, {step.step:.2f} s a step"]
    if best.grid.has_separate_rollout:
        longer = "rollouts take" if step.rollouts > step.training else "training takes"
        waits = "" if overlaps else ", and each kind waits while the other works"
        sentences.append(
            f"{longer} longer (rollouts {step.rollouts:.2f} s, training {step.training:.2f} s){waits}: ranks that "
            f"train wait {step.idle_trainers:.0%} of a step, those that sample {step.idle_samplers:.0%}"
        )
    else:
        sentences.append("no rank waits for another kind of rank")
    sentences.append(f"the refit costs {step.refit / step.step:.1%}")
    rival = next((split for split in others if split.grid.has_separate_rollout != best.grid.has_separate_rollout), None)
    if rival is not None:
        which = (
            f"the fastest split, {rival.description},"
            if rival.grid.has_separate_rollout
            else f"the case that {rival.description}"
        )
        sentences.append(f"{which} takes {rival.step(overlaps=overlaps).step / step.step:.2f} times as long")
    return "; ".join(sentences)
