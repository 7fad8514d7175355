"""Which ranks should train and which sample: every split of a job's ranks, timed by the plan's own models.

Owns the search and its words. A split is the same config with other ranks to sample; its layouts, and all else, stay.
What a split takes is the sum of `durations.py`, `refits.py` and `memory.py` for it, as for a config that asks for it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mrl.commands.plan.durations import Durations, StepTime, predict_durations, step_time
from mrl.commands.plan.fit import Overrides, changed, device_of, shortage, where_of, words
from mrl.commands.plan.memory import StageMemory, memory_by_stage
from mrl.commands.plan.refits import RefitPrediction, predict_refit
from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.fields import needs_mpi
from mrl.engines.trtllm.llm_runtime import check_hosts
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import counted
from mrl.parallel_layout import Grid
from mrl.trainer.resolve import Resolved

TIMED_RANKS = 1 << 13
"""Splits x ranks whose refits are predicted, though they cannot be the fastest."""
MAX_ROWS = 10
"""Splits that are shown."""
GB = 1e9


@dataclass
class Split:
    """Some ranks that train and some that sample, which fit their GPUs; or all that do both.

    Attributes:
        found: The run with this split.
        overrides: What makes it of the config that was asked about.
        hardware: Of its GPUs.
        stages: Its memory.
        durations: Of its phases.
        known: Its refit, where that was predicted before.
    """

    found: Resolved
    overrides: Overrides
    hardware: Hardware
    stages: list[StageMemory]
    durations: Durations
    known: RefitPrediction | None = None

    @property
    def grid(self) -> Grid:
        """Who sits where."""
        return self.found.grid

    @cached_property
    def refit(self) -> RefitPrediction:
        """Of its layouts; to predict it takes longer than all the rest."""
        return self.known or predict_refit(self.found.config, self.found.arch, self.grid, self.hardware)

    def step(self, *, overlaps: bool) -> StepTime:
        """A step of it."""
        return step_time(self.durations, self.refit.seconds, has_roles=self.grid.has_roles, overlaps=overlaps)

    def at_least(self, *, overlaps: bool) -> float:
        """Of a step, s, if the refit took no time."""
        return step_time(self.durations, 0.0, has_roles=self.grid.has_roles, overlaps=overlaps).step

    @property
    def described(self) -> str:
        """Who does what."""
        grid = self.grid
        if not grid.has_roles:
            return f"all {grid.world_size} ranks train and sample in turns"
        return f"{counted(len(grid.trainers), 'rank')} train and {len(grid.samplers)} sample"


@dataclass(frozen=True)
class Splits:
    """Every split of a run's ranks.

    Attributes:
        fitting: Those that can work.
        left_out: Why others cannot -> how many.
    """

    fitting: list[Split]
    left_out: Counter[str]

    def ranked(self, *, overlaps: bool) -> list[Split]:
        """The fastest first: all of them, or with many ranks those among which the fastest must be.

        A refit takes no less than nothing: a split that is slower without one need not be timed.
        """
        order = sorted(self.fitting, key=lambda split: split.at_least(overlaps=overlaps))
        timed: list[Split] = []
        best = math.inf
        for split in order:
            few = (len(timed) + 1) * split.grid.world_size <= TIMED_RANKS
            if not few and split.at_least(overlaps=overlaps) >= best:
                break
            timed.append(split)
            best = min(best, split.step(overlaps=overlaps).step)
        return sorted(timed, key=lambda split: split.step(overlaps=overlaps).step)


def find_splits(found: Resolved, hardware: Hardware, refit: RefitPrediction | None = None) -> Splits:
    """All splits of the run's ranks into those that train and those that sample, its own and the undivided job too.

    Args:
        found: The run, which samples.
        hardware: Its cluster.
        refit: Of the run as it is, where it is known.
    """
    fitting: list[Split] = []
    left_out: Counter[str] = Counter()
    for samplers in range(found.grid.world_size):
        overrides = _overrides(found.config.rollout, samplers)
        try:
            other = changed(found, overrides)
            if needs_mpi(other.config.rollout):
                _check_hosts(other.grid, hardware)
        except UserError as error:
            left_out[_kind(str(error))] += 1
            continue
        device = device_of(hardware, other.grid)
        stages = memory_by_stage(other, device)
        short = shortage(stages, device.capacity or 0)
        if short is not None:
            left_out[f"{where_of(short.stage, other.grid)} lacks memory in its {short.phase}"] += 1
            continue
        durations = predict_durations(other, hardware, rows_of(stages))
        known = refit if other.grid == found.grid else None
        fitting.append(Split(other, _differing(found, overrides), hardware, stages, durations, known))
    return Splits(fitting, left_out)


def rows_of(stages: list[StageMemory]) -> int:
    """Sequences that a replica decodes at a time; 0 where nothing is sampled."""
    return min((stage.kv_rows for stage in stages if "rollout" in stage.phases), default=0)


def _overrides(rollout: RolloutConfig, samplers: int) -> dict[str, Any]:
    """As the config writes it, in nodes or in ranks."""
    per_node = rollout.n_gpus_per_node
    if rollout.nnodes and samplers and samplers % per_node == 0:
        return {"rollout.num_ranks": 0, "rollout.nnodes": samplers // per_node}
    return {
        "rollout.num_ranks": samplers,
        "rollout.nnodes": 0,
        "rollout.n_gpus_per_node": RolloutConfig.n_gpus_per_node,
    }


def _differing(found: Resolved, overrides: dict[str, Any]) -> Overrides:
    rollout = found.config.rollout
    return {key: value for key, value in overrides.items() if getattr(rollout, key.rpartition(".")[2]) != value}


def _check_hosts(grid: Grid, hardware: Hardware) -> None:
    for first in grid.samplers[:: grid.rollout_size]:
        check_hosts(first, grid.rollout_size, hardware.gpus_per_node, hardware.gpus_per_node)


NUMBER = re.compile(r"\d+( to \d+)?")
KINDS = {
    "does not divide the # rank(s) of this job": "ranks that train are no multiple of the actor's layout",
    "does not divide the # rank(s) of a pipeline stage": "the experts' layout does not divide a pipeline stage",
    "rank(s) of this job that sample": "ranks that sample are no multiple of a replica",
    "TensorRT-LLM wants a replica inside": "a replica would lie across nodes, which TensorRT-LLM does not take",
    "some ranks would never train": "a minibatch is smaller than the data-parallel size",
}
"""A part of a refusal, its numbers aside -> what is told of it."""


def _kind(message: str) -> str:
    """What several splits are refused for alike."""
    plain = NUMBER.sub("#", message)
    known = [said for part, said in KINDS.items() if part in plain]
    return known[-1] if known else plain.splitlines()[0].partition(". ")[0].replace("#", "N")


# words ----------------------------------------------------------------------------------------------------------------


def splits_text(splits: Splits, own: Grid, *, overlaps: bool) -> Iterator[str]:
    """The table of splits, the best one, and why it is.

    Args:
        splits: Of a run.
        own: The layout that its config asks for.
        overlaps: Ranks that sample do so while the others train.
    """
    ranked = splits.ranked(overlaps=overlaps)
    yield (
        f"splits of {counted(own.world_size, 'rank')} into those that train and those that sample, s a step, "
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
        yield f"  and {counted(slower, 'slower split')}"
    if splits.left_out:
        yield f"  left out: {_reasons(splits)}"
    yield f"  best: {why(ranked, overlaps=overlaps)}"
    if not overlaps and any(split.grid.has_roles for split in splits.fitting):
        yield f"  best with train.mode=async: {why(splits.ranked(overlaps=True), overlaps=True)}"


def _row(split: Split, own: Grid, *, best: bool, overlaps: bool) -> str:
    grid, step = split.grid, split.step(overlaps=overlaps)
    mark = "*" if best else " "
    asked = "  this config" if grid == own else ""
    sizes = [max((stage.total(stage.peak) for stage in part), default=0) for part in _sides(split)]
    samples = str(len(grid.samplers)) if grid.has_roles else "same"
    waits = [f"{idle:.0%}" if grid.has_roles else "-" for idle in (step.idle_trainers, step.idle_samplers)]
    memory = ", ".join(f"{size / GB:.0f}" for size in sizes if size)
    return (
        f"{mark:>2}{len(grid.trainers):>7}{samples:>8}{step.refit:>9.3f}{step.rollouts:>10.2f}{step.training:>10.2f}"
        f"{step.step:>10.2f}{waits[0]:>13}{waits[1]:>14}  {memory}{asked}"
    )


def _sides(split: Split) -> tuple[list[StageMemory], list[StageMemory]]:
    """Of ranks that train, and of those that only sample."""
    samplers = [stage for stage in split.stages if stage.stage is None]
    return [stage for stage in split.stages if stage.stage is not None], samplers


def _reasons(splits: Splits) -> str:
    return "; ".join(f"{counted(count, 'split')}: {why}" for why, count in splits.left_out.most_common())


def why(ranked: list[Split], *, overlaps: bool) -> str:
    """The first of the splits, and what makes it the fastest, in words.

    Args:
        ranked: The fastest first.
        overlaps: As they are ranked.
    """
    best, others = ranked[0], ranked[1:]
    step = best.step(overlaps=overlaps)
    keys = f" ({words(best.overrides)})" if best.overrides else ", as the config has it"
    said = [f"{best.described}{keys}, {step.step:.2f} s a step"]
    if best.grid.has_roles:
        longer = "rollouts take" if step.rollouts > step.training else "training takes"
        held = "" if overlaps else ", and each kind waits while the other works"
        said.append(
            f"{longer} longer (rollouts {step.rollouts:.2f} s, training {step.training:.2f} s){held}: ranks that train "
            f"wait {step.idle_trainers:.0%} of a step, those that sample {step.idle_samplers:.0%}"
        )
    else:
        said.append("nobody waits for another kind")
    said.append(f"the refit costs {step.refit / step.step:.1%}")
    rival = next((split for split in others if split.grid.has_roles != best.grid.has_roles), None)
    if rival is not None:
        what = f"the fastest split, {rival.described}," if rival.grid.has_roles else f"that {rival.described}"
        said.append(f"{what} takes {rival.step(overlaps=overlaps).step / step.step:.2f} times as long")
    return "; ".join(said)
