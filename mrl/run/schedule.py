"""How long a run trains, and how its learning rate moves meanwhile."""

from __future__ import annotations

from mrl.config import Config, TrainConfig
from mrl.data.prompts import PromptSource
from mrl.data.steps import optimizer_steps, prompts_of
from mrl.megatron.optimizer import LearningRate


def learning_rate(config: Config) -> LearningRate:
    """The schedule over all optimizer steps of the run."""
    actor, total = config.actor, optimizer_steps(config)
    if total is None:
        raise RuntimeError("train.num_steps is open: with_num_steps comes first")
    return LearningRate(actor.lr, actor.min_lr, actor.lr_schedule, actor.lr_warmup_steps, total)


def warm_start_learning_rate(config: Config) -> LearningRate:
    """The schedule of the warm start."""
    warm = config.train.warm_start
    return LearningRate(warm.lr, 0.0, "constant", warm.lr_warmup_steps, warm.num_steps)


def is_over(train: TrainConfig, source: PromptSource, step: int) -> bool:
    """Whether a run ends after so many steps: it has its number, or less than a batch of its epochs is left."""
    if train.num_epochs is not None:
        left = prompts_of(train.num_epochs, source.num_rows) - source.position
        if left < train.batch_size:
            return True
    return train.num_steps is not None and step >= train.num_steps
