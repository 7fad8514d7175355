"""How long a run is: its steps, by number or by passes over the data, and the optimizer steps in them.

Owns `train.num_steps`, `train.num_epochs` and `actor.ppo_epochs` as counts. The end by passes is asked of the prompt
stream itself, since dropped prompts and dynamic sampling use it up faster than steps do.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mrl.config.config import Config, TrainConfig
from mrl.errors import UserError

UNASKED_STEPS = 100
"""Of a run whose config says neither steps nor epochs."""


def prompts_of(num_epochs: float, num_rows: int) -> int:
    """Whole rows in so many passes over the data, a part of a pass as it is written: 0.1 of 30 rows is 3."""
    return int(Fraction(str(num_epochs)) * num_rows)


def with_num_steps(config: Config, num_rows: int) -> Config:
    """The config with `train.num_steps` as the most that the run can take, by number and by passes over the data.

    Giving it its own result changes nothing.

    Args:
        config: Of the run.
        num_rows: Of a pass over the training data.

    Raises:
        UserError: The passes hold less than one batch.
    """
    train = config.train
    if train.num_epochs is None:
        return config if train.num_steps is not None else replace(config, train=replace(train, num_steps=UNASKED_STEPS))
    num_prompts = prompts_of(train.num_epochs, num_rows)
    steps = num_prompts // train.batch_size
    if not steps:
        raise UserError(
            f"train.num_epochs={train.num_epochs} passes over {num_rows} rows are {num_prompts} prompts, fewer "
            f"than train.batch_size={train.batch_size}: there would be no step. Raise the one or lower the other."
        )
    steps = steps if train.num_steps is None else min(steps, train.num_steps)
    return replace(config, train=replace(train, num_steps=steps))


def minibatches_of_a_step(config: Config) -> int:
    """Parts of a batch, each of which is an optimizer step."""
    train = config.train
    return train.batch_size // (train.minibatch_size or train.batch_size)


def optimizer_steps(config: Config) -> int | None:
    """Of the actor in the whole run, the warm start aside; None while `train.num_steps` is open."""
    steps = config.train.num_steps
    if steps is None:
        return None
    return max(0, steps - config.train.critic_warmup) * config.actor.ppo_epochs * minibatches_of_a_step(config)


def is_over(train: TrainConfig, step: int, *, position: int, num_rows: int) -> bool:
    """Whether a run ends after so many steps: it has its number, or less than a batch of its epochs is left.

    Args:
        train: Of the config.
        step: The last one that is done.
        position: Prompts that were drawn.
        num_rows: Of a pass over the training data.
    """
    if train.num_epochs is not None and prompts_of(train.num_epochs, num_rows) - position < train.batch_size:
        return True
    return train.num_steps is not None and step >= train.num_steps
