"""Rules of the section `critic`, and the config from which a critic is built like an actor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace

from mrl.config.config import Config, CriticConfig, LoraConfig, OptimizerConfig
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_length import optimizer_steps
from mrl.trainer.validation.lora import adapted_module_rules, section_rules
from mrl.trainer.validation.parallel import same_layout_rules
from mrl.trainer.validation.train import rate_rules


def critic_config(config: Config) -> Config:
    """Returns the config with the critic's settings in the section `actor`, and no `train.critic_warmup`."""
    own = {item.name: getattr(config.critic, item.name) for item in fields(OptimizerConfig)}
    epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
    actor = replace(config.actor, **own, ppo_epochs=epochs, router_replay="none", lora=adapters_of(config))
    return replace(config, actor=actor, train=replace(config.train, critic_warmup=0))


def adapters_of(config: Config) -> LoraConfig:
    """Returns the settings of the critic's adapters as those of an actor's."""
    return LoraConfig(**asdict(config.critic.lora))


def check_critic(config: Config, arch: ArchSpec, critic: ArchSpec | None, grid: ParallelLayout) -> None:
    """Checks the section `critic` and `train.critic_warmup`.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Architecture of the actor.
        critic: Architecture of the critic; None if the algorithm has none.
        grid: Parallel layout of actor and critic.

    Raises:
        UserError: The first broken rule.
    """
    for message in _idle(config) if critic is None else _rules(config, arch, critic, grid):
        raise UserError(message)


def _idle(config: Config) -> Iterator[str]:
    why = f"would have no effect because algorithm.name={config.algorithm.name} has no critic"
    for item in fields(CriticConfig):
        if getattr(config.critic, item.name) != getattr(CriticConfig(), item.name):
            yield f"critic.{item.name} is set, but {why}. Remove it, or change that."
    if config.train.critic_warmup:
        yield f"train.critic_warmup is set, but {why}. Remove it, or change that."


def _adapter_rules(config: Config, critic: ArchSpec) -> Iterator[str]:
    """Yields a message for each broken rule of `critic.lora`."""
    lora, path = adapters_of(config), config.critic.path
    yield from section_rules("critic.lora", lora, config)
    if not lora.rank:
        return
    if not config.actor.lora.rank and path is None:
        yield (
            "critic.lora.rank without actor.lora.rank: the adapters belong to the actor's first weights, which the "
            "actor would change. Set actor.lora.rank too, or critic.path."
        )
    yield from adapted_module_rules("critic.lora", lora, critic)


def _rules(config: Config, arch: ArchSpec, critic: ArchSpec, grid: ParallelLayout) -> Iterator[str]:
    own, path = critic_config(config), config.critic.path
    yield from rate_rules("critic", own.actor, optimizer_steps(own))
    steps, warmup = config.train.num_steps, config.train.critic_warmup
    if steps is not None and 0 < steps <= warmup:
        yield (
            f"train.critic_warmup={warmup} leaves none of train.num_steps={steps} to train the actor. "
            "Lower train.critic_warmup or raise train.num_steps."
        )
    if critic.vocab_size != arch.vocab_size:
        yield (
            f"critic.path={path} has a vocabulary of {critic.vocab_size} tokens, but the actor has {arch.vocab_size}, "
            "and the critic reads the actor's tokens. Choose a model with the same tokenizer, or remove critic.path."
        )
    yield from _adapter_rules(config, critic)
    for message in same_layout_rules(config, arch, critic, grid, host="actor", name="critic"):
        yield f"critic.path={path}{message}"
