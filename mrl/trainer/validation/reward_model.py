"""A reward model as the config has it, and what is refused of it. It imports no torch."""

from __future__ import annotations

from dataclasses import fields, replace

from mrl.config.config import Config, RewardModelConfig
from mrl.errors import UserError
from mrl.models.base import ArchSpec, critic_of
from mrl.models.hf_config import arch_from_folder, read_config
from mrl.parallel_layout import Grid
from mrl.trainer.validation.frozen_models import guest_rules

LABELS = "id2label"
_UNLABELLED = 2
"""Labels of a model whose config.json says nothing, in transformers."""


def reward_arch(config: Config) -> ArchSpec | None:
    """The structure of the reward model; None: there is none.

    Raises:
        UserError: A field of it is set and there is none, or its folder holds no model with one label.
    """
    named = config.reward.model
    if named.path is None:
        for item in fields(RewardModelConfig):
            if getattr(named, item.name) != item.default:
                raise UserError(
                    f"reward.model.{item.name} is set, but would have no effect because reward.model.path is null. "
                    "Remove it, or change that."
                )
        return None
    try:
        found, said = arch_from_folder(named.path), read_config(named.path)
    except UserError as error:
        raise UserError(f"reward.model.path: {error}") from error
    labels = said.get(LABELS)
    count = len(labels) if isinstance(labels, dict) else said.get("num_labels", _UNLABELLED)
    if count != 1:
        raise UserError(
            f"reward.model.path={named.path} has {count} labels ({LABELS} in config.json), expected 1: a reward model "
            "gives one number. Give a sequence classifier that was trained with num_labels=1."
        )
    return critic_of(found)


def check_reward_model(
    config: Config, arch: ArchSpec, reward: ArchSpec | None, grid: Grid, *, retokenizes: bool
) -> None:
    """Every rule of `reward.model`.

    Args:
        config: What was asked for.
        arch: The actor.
        reward: From `reward_arch`.
        grid: The layout of both.
        retokenizes: It reads the text anew, so that how long it becomes is known sample by sample.

    Raises:
        UserError: The first broken rule.
    """
    if reward is None:
        return
    named = config.reward.model
    where = f"reward.model.path={named.path}"
    if retokenizes and config.rollout.multi_turn.enable:
        raise UserError(
            f"{where} reads with another tokenizer than the actor's, which is refused with "
            "rollout.multi_turn.enable=true: an episode is not rendered again. Give a reward model with the actor's "
            "tokenizer."
        )
    if retokenizes:
        reward = replace(reward, max_position_embeddings=max(reward.max_position_embeddings, config.rollout.longest))
    for message in guest_rules(config, arch, reward, grid, host="actor", name="reward model"):
        raise UserError(f"{where}{message}")
