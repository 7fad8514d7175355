"""Rules of the section `reward.model`, and the architecture of the reward model. Imports no torch."""

from __future__ import annotations

from dataclasses import fields, replace

from mrl.config.config import Config, RewardModelConfig
from mrl.errors import UserError
from mrl.models.base import ArchSpec, critic_of
from mrl.models.hf_config import arch_from_folder, read_config
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.validation.parallel import same_layout_rules

LABELS = "id2label"
_UNLABELLED = 2
"""Number of labels in transformers if config.json does not set it."""


def reward_arch(config: Config) -> ArchSpec | None:
    """Returns the architecture of the reward model; None without `reward.model.path`.

    Raises:
        UserError: Another field of `reward.model` is set without a path, or the model does not have one label.
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
        arch, hf_config = arch_from_folder(named.path), read_config(named.path)
    except UserError as error:
        raise UserError(f"reward.model.path: {error}") from error
    labels = hf_config.get(LABELS)
    count = len(labels) if isinstance(labels, dict) else hf_config.get("num_labels", _UNLABELLED)
    if count != 1:
        raise UserError(
            f"reward.model.path={named.path} has {count} labels ({LABELS} in config.json), expected 1. Choose a "
            "sequence classifier that was trained with num_labels=1."
        )
    return critic_of(arch)


def check_reward_model(
    config: Config, arch: ArchSpec, reward: ArchSpec | None, grid: ParallelLayout, *, retokenizes: bool
) -> None:
    """Checks the section `reward.model`.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Architecture of the actor.
        reward: Architecture from `reward_arch`; None: nothing to check.
        grid: Parallel layout of both models.
        retokenizes: True if the reward model encodes the text with its own tokenizer. Lengths are then checked for each
            sample.

    Raises:
        UserError: The first broken rule.
    """
    if reward is None:
        return
    named = config.reward.model
    where = f"reward.model.path={named.path}"
    if retokenizes and config.rollout.multi_turn.enable:
        raise UserError(
            f"{where} has another tokenizer than the actor, which is not supported with "
            "rollout.multi_turn.enable=true, because episodes are never rendered again. Choose a reward model with the "
            "actor's tokenizer."
        )
    if retokenizes:
        reward = replace(
            reward, max_position_embeddings=max(reward.max_position_embeddings, config.rollout.max_sequence_length)
        )
    for message in same_layout_rules(config, arch, reward, grid, host="actor", name="reward model"):
        raise UserError(f"{where}{message}")
