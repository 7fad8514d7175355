"""Learning-rate schedules of the run and of its warm start, from the config."""

from __future__ import annotations

from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.config.config import Config
from mrl.trainer.run_length import decay_steps, optimizer_steps, warmup_steps


def learning_rate(config: Config) -> LearningRate:
    """Returns the schedule over all optimizer steps of the run."""
    actor, total = config.actor, optimizer_steps(config)
    if total is None:
        raise RuntimeError("train.num_steps is None. Call with_num_steps() first.")
    return LearningRate(
        actor.lr, actor.min_lr, actor.lr_schedule, warmup_steps(actor, total), total,
        decay_steps=decay_steps(actor, total),
    )  # fmt: skip


def warm_start_learning_rate(config: Config) -> LearningRate:
    """Returns the schedule of the warm start."""
    warm = config.train.warm_start
    return LearningRate(warm.lr, 0.0, "constant", warm.lr_warmup_steps, warm.num_steps)
