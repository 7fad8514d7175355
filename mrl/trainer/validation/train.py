"""Refuses steps that cannot be made: batches, minibatches, the learning rate's schedule.

Owns the rules of `train` and of the fields of `actor` that say how a step is made. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import ActorConfig, Config
from mrl.parallel_layout import Grid
from mrl.trainer.num_steps import optimizer_steps

MAX_SEQUENCES = 1 << 24
"""Of a step: prompts x samples."""


def step_rules(config: Config, grid: Grid) -> Iterator[str]:
    """A message for each broken rule about the steps."""
    train = config.train
    if train.batch_size * config.rollout.n > MAX_SEQUENCES:
        yield (
            f"train.batch_size={train.batch_size} x rollout.n={config.rollout.n} are more than {MAX_SEQUENCES} "
            "sequences of a step."
        )
    minibatch = train.minibatch_size or train.batch_size
    if train.batch_size % minibatch:
        yield f"train.minibatch_size={minibatch} does not divide train.batch_size={train.batch_size}."
    if train.warm_start.num_steps and train.warm_start.batch_size < grid.dp:
        yield f"train.warm_start.batch_size={train.warm_start.batch_size} is below the data-parallel size {grid.dp}."
    if train.num_steps == 0 and not train.warm_start.num_steps:
        yield "train.num_steps and train.warm_start.num_steps are both 0: there is nothing to do."
    yield from rate_rules("actor", config.actor, optimizer_steps(config))


def rate_rules(section: str, rates: ActorConfig, total: int | None) -> Iterator[str]:
    """A message for each broken rule about a learning rate.

    Args:
        section: Of the config.
        rates: What it says.
        total: Optimizer steps of the run; None: not known.
    """
    if rates.min_lr > rates.lr:
        yield f"{section}.min_lr={rates.min_lr} is above {section}.lr={rates.lr}."
    if rates.min_lr > 0 and rates.lr_schedule == "constant":
        yield (
            f"{section}.min_lr is set, but would have no effect because {section}.lr_schedule is constant. Remove it, "
            "or change that."
        )
    if rates.lr_schedule != "constant" and total is not None and 0 < total <= rates.lr_warmup_steps:
        yield (
            f"{section}.lr_warmup_steps={rates.lr_warmup_steps} leaves nothing of the run's {total} optimizer steps "
            f"for {section}.lr_schedule={rates.lr_schedule}."
        )


def share_rules(config: Config, grid: Grid, *, supervised: bool) -> Iterator[str]:
    """A message where a data-parallel rank would get nothing of a minibatch.

    Args:
        config: What was asked for.
        grid: The layout.
        supervised: The algorithm samples nothing.
    """
    prompts = config.train.minibatch_size or config.train.batch_size
    if prompts * (1 if supervised else config.rollout.n) < grid.dp:
        what = (
            f"a batch of {prompts} examples"
            if supervised
            else (f"a minibatch of {prompts} prompts x rollout.n={config.rollout.n} samples")
        )
        raised = "train.batch_size" if supervised else "train.minibatch_size or rollout.n"
        yield (
            f"{what} is smaller than the data-parallel size {grid.dp}: some ranks would never train. Raise {raised}."
        )
