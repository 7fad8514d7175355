"""Rules of batches, minibatches and learning rates: the section `train` and parts of `actor`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config, OptimizerConfig
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_length import decay_steps, optimizer_steps, warmup_steps

MAX_SEQUENCES = 1 << 24
"""Maximum number of sequences in a step: prompts x samples."""


def step_rules(config: Config, grid: ParallelLayout) -> Iterator[str]:
    """Yields a message for each broken rule about batch sizes, numbers of steps and the actor's learning rate."""
    train = config.train
    if train.batch_size * config.rollout.n > MAX_SEQUENCES:
        yield (
            f"train.batch_size={train.batch_size} x rollout.n={config.rollout.n} is more than {MAX_SEQUENCES} "
            "sequences in a step. Lower one of them."
        )
    minibatch = train.minibatch_size or train.batch_size
    if train.batch_size % minibatch:
        yield (
            f"train.minibatch_size={minibatch} does not divide train.batch_size={train.batch_size}. Choose a divisor."
        )
    if train.warm_start.num_steps and train.warm_start.batch_size < grid.dp:
        yield (
            f"train.warm_start.batch_size={train.warm_start.batch_size} is below the data-parallel size {grid.dp}. "
            "Raise it to at least that."
        )
    if train.num_steps == 0 and not train.warm_start.num_steps:
        yield "train.num_steps and train.warm_start.num_steps are both 0, so nothing would run. Raise one of them."
    yield from rate_rules("actor", config.actor, optimizer_steps(config))


def rate_rules(section: str, rates: OptimizerConfig, total: int | None) -> Iterator[str]:
    """Yields a message for each broken rule about a learning rate.

    Args:
        section: Name of the config section, "actor" or "critic".
        rates: Section with the learning rate.
        total: Optimizer steps of the run; None if unknown.
    """
    if rates.min_lr > rates.lr:
        yield f"{section}.min_lr={rates.min_lr} is above {section}.lr={rates.lr}. Lower it."
    if rates.min_lr > 0 and rates.lr_schedule == "constant":
        yield (
            f"{section}.min_lr is set, but would have no effect because {section}.lr_schedule is constant. Remove it, "
            "or change that."
        )
    if rates.lr_schedule != "wsd" and rates.lr_decay_frac != OptimizerConfig.lr_decay_frac:
        yield (
            f"{section}.lr_decay_frac={rates.lr_decay_frac} would have no effect because {section}.lr_schedule is "
            f"{rates.lr_schedule}. Remove it, or set {section}.lr_schedule=wsd."
        )
    if rates.lr_warmup_steps and rates.lr_warmup_frac:
        yield (
            f"{section}.lr_warmup_steps={rates.lr_warmup_steps} and {section}.lr_warmup_frac={rates.lr_warmup_frac} "
            "are both set. Remove one of them."
        )
    if rates.lr_schedule != "constant" and total:
        key = "lr_warmup_steps" if rates.lr_warmup_steps else "lr_warmup_frac"
        decay = decay_steps(rates, total) if rates.lr_schedule == "wsd" else 1
        warmup = warmup_steps(rates, total)
        if warmup + decay > total:
            left = "none" if warmup >= total else f"only {total - warmup}"
            yield (
                f"{section}.{key}={getattr(rates, key)} leaves {left} of the run's {total} optimizer steps "
                f"for {section}.lr_schedule={rates.lr_schedule}. Lower it, or raise train.num_steps."
            )


def share_rules(config: Config, grid: ParallelLayout, *, supervised: bool) -> Iterator[str]:
    """Yields a message if a minibatch has fewer sequences than data-parallel ranks; `supervised`: without sampling."""
    prompts = config.train.minibatch_size or config.train.batch_size
    if prompts * (1 if supervised else config.rollout.n) < grid.dp:
        batch = (
            f"A batch of {prompts} examples"
            if supervised
            else (f"A minibatch of {prompts} prompts x rollout.n={config.rollout.n} samples")
        )
        keys = "train.batch_size" if supervised else "train.minibatch_size or rollout.n"
        yield (
            f"{batch} is smaller than the data-parallel size {grid.dp}, so some ranks would never train. Raise {keys}."
        )
