"""Length of a run: steps from `train.num_steps` or `train.num_epochs`, and optimizer steps from `actor.ppo_epochs`.

With epochs, `is_over` checks the position in the data, because dynamic sampling drops prompts and so consumes the data
faster than one batch a step.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mrl.config.config import Config, OptimizerConfig, TrainConfig
from mrl.errors import UserError

UNASKED_STEPS = 100
"""Number of steps if the config sets neither `train.num_steps` nor `train.num_epochs`."""


def prompts_of(num_epochs: float, num_rows: int) -> int:
    """Returns the number of rows in `num_epochs` passes, rounded down; exact for decimals: 0.1 of 30 rows is 3."""
    return part_of(num_epochs, num_rows)


def part_of(frac: float, total: int) -> int:
    """Returns a fraction of a number of steps, rounded down; exact for decimals."""
    return int(Fraction(str(frac)) * total)


def warmup_steps(rates: OptimizerConfig, total: int) -> int:
    """Returns the warm-up in optimizer steps, from `lr_warmup_steps` or `lr_warmup_frac` of `total`."""
    return rates.lr_warmup_steps or part_of(rates.lr_warmup_frac, total)


def decay_steps(rates: OptimizerConfig, total: int) -> int:
    """Returns the optimizer steps in which the schedule wsd decays, at least 1."""
    return max(1, part_of(rates.lr_decay_frac, total))


def with_num_steps(config: Config, num_rows: int) -> Config:
    """Returns the config with `train.num_steps` set to the maximum number of steps; idempotent.

    Args:
        config: Settings of the run.
        num_rows: Rows of the training data.

    Raises:
        UserError: `train.num_epochs` is less than one batch.
    """
    train = config.train
    if train.num_epochs is None:
        return config if train.num_steps is not None else replace(config, train=replace(train, num_steps=UNASKED_STEPS))
    num_prompts = prompts_of(train.num_epochs, num_rows)
    steps = num_prompts // train.batch_size
    if not steps:
        raise UserError(
            f"train.num_epochs={train.num_epochs} of {num_rows} rows are {num_prompts} prompts, fewer than one batch "
            f"of train.batch_size={train.batch_size}. Raise train.num_epochs or lower train.batch_size."
        )
    steps = steps if train.num_steps is None else min(steps, train.num_steps)
    return replace(config, train=replace(train, num_steps=steps))


def minibatches_per_step(config: Config) -> int:
    """Returns the number of minibatches, and so of optimizer steps, in one pass over a batch."""
    train = config.train
    return train.batch_size // (train.minibatch_size or train.batch_size)


def optimizer_steps(config: Config) -> int | None:
    """Returns the actor's optimizer steps in the run, without the warm start; None if `train.num_steps` is None."""
    steps = config.train.num_steps
    if steps is None:
        return None
    return max(0, steps - config.train.critic_warmup) * config.actor.ppo_epochs * minibatches_per_step(config)


def is_over(train: TrainConfig, step: int, *, position: int, num_rows: int) -> bool:
    """Returns whether the run ends: all steps are done, or less than a batch of the epochs is left.

    Args:
        train: Config section `train`.
        step: Number of steps done.
        position: Number of prompts consumed.
        num_rows: Rows of the training data.
    """
    if train.num_epochs is not None and prompts_of(train.num_epochs, num_rows) - position < train.batch_size:
        return True
    return train.num_steps is not None and step >= train.num_steps
