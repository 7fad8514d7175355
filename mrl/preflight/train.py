"""Refuses steps that cannot be made: batches, minibatches, the learning rate's schedule.

Owns the rules of `train` and of the fields of `actor` that say how a step is made. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config import Config
from mrl.data.steps import optimizer_steps
from mrl.grid import Grid

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
    actor = config.actor
    if actor.min_lr > actor.lr:
        yield f"actor.min_lr={actor.min_lr} is above actor.lr={actor.lr}."
    total = optimizer_steps(config)
    if actor.lr_schedule != "constant" and total is not None and 0 < total <= actor.lr_warmup_steps:
        yield (
            f"actor.lr_warmup_steps={actor.lr_warmup_steps} leaves nothing of the run's {total} optimizer steps for "
            f"actor.lr_schedule={actor.lr_schedule}."
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
