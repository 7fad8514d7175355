"""Placeholders for files that exist only on the cluster.

A model is replaced by the preset that its folder's name contains, a tokenizer by one token per byte, prompts by
generated ones.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hub import resolve_model_path
from mrl.commands.rehearse.engine import DEFAULT_ENGINE
from mrl.config.config import Config, DataConfig, RewardConfig, RewardFunctionConfig, RewardModelConfig
from mrl.config.paths import BYTES, CHAR_PREFIX
from mrl.data.hub_files import is_hub_location, is_local
from mrl.errors import UserError
from mrl.models.presets import PRESETS

TASK = "addition"
FLAG = "--stand-ins"
OF_DATA_SETS = ("by_data_source", "code", "countdown", "qa")
"""Reward functions that need the rows of certain data sets."""


def missing_paths(config: Config) -> dict[str, str]:
    """Returns config key -> its first path that does not exist here."""
    found: dict[str, str] = {}
    for key, path in _missing(config):
        found.setdefault(key, path)
    return found


@contextmanager
def hint_at_placeholders(config: Config) -> Iterator[None]:
    """Adds to a UserError the option that replaces missing files, if files are missing."""
    try:
        yield
    except UserError as error:
        if not (missing := missing_paths(config)):
            raise
        raise UserError(
            f"{error}\nTo go on without files that exist only on the cluster ({', '.join(missing)}), add {FLAG}."
        ) from error


def _missing(config: Config) -> Iterator[tuple[str, str]]:
    folders = {
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "reference.path": config.reference.path,
        "critic.path": config.critic.path,
        "reward.model.path": config.reward.model.path,
        "rollout.engine_dir": config.rollout.engine_dir,
    }
    for key, folder in folders.items():
        if folder is not None and not folder.startswith((CHAR_PREFIX, BYTES)) and not _exists(key, folder):
            yield key, folder
    for index, teacher in enumerate(config.distillation.teacher_models):
        key = _teacher_key(index)
        if teacher.model_path is not None and not _exists(key, teacher.model_path):
            yield key, teacher.model_path
    yield from missing_files(config.data)


def missing_files(data: DataConfig, *, on_hub: bool = False) -> list[tuple[str, str]]:
    """Returns config key and path of each data file that does not exist here.

    Args:
        data: Names of the files.
        on_hub: Only files that are named as on the hub.
    """
    keys = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    return [
        (key, file)
        for key, files in keys.items()
        for file in files
        if not is_local(key, file) and (is_hub_location(file) or not on_hub)
    ]


def _exists(key: str, folder: str) -> bool:
    try:
        return os.path.isdir(resolve_model_path(key, folder, weights=key != "model.tokenizer") or "")
    except UserError:
        return False


def with_placeholders(config: Config) -> tuple[Config, list[str]]:
    """Replaces missing files; returns the config and a line for each replacement.

    Raises:
        UserError: No preset matches the missing model.
    """
    missing = missing_paths(config)
    replacements = []
    model = config.model
    no_tokenizer = "model.tokenizer" in missing or (model.tokenizer is None and "model.path" in missing)
    if "model.path" in missing:
        preset = matching_preset(missing["model.path"])
        replacements.append(f"model.path={model.path} is missing: preset {preset} is used, with random weights")
        sizes = {"vocab_size": PRESETS[preset]["vocab_size"]}
        model = replace(model, path=None, preset=preset, overrides=sizes)
    if "reference.path" in missing:
        replacements.append(f"reference.path={config.reference.path} is missing: the initial actor is the reference")
    if "critic.path" in missing:
        replacements.append(f"critic.path={config.critic.path} is missing: the critic starts from the actor")
    config, notes = with_placeholder_texts(replace(config, model=model), missing_files(config.data), no_tokenizer)
    model, data = config.model, config.data
    replacements += notes
    rollout = config.rollout
    if "rollout.engine_dir" in missing:
        replacements.append(f"rollout.engine_dir={rollout.engine_dir} is missing: its engines are not checked")
        rollout = replace(rollout, name=DEFAULT_ENGINE, engine_dir=None, pipeline_model_parallel_size=1)
    reference = replace(config.reference, path=None) if "reference.path" in missing else config.reference
    critic = replace(config.critic, path=None) if "critic.path" in missing else config.critic
    reward = config.reward
    if "reward.model.path" in missing:
        replacements.append(f"reward.model.path={reward.model.path} is missing: samples are rewarded without it")
        functions = reward.functions or [RewardFunctionConfig()]
        reward = replace(reward, model=RewardModelConfig(), functions=functions)
    teachers = []
    for index, teacher in enumerate(config.distillation.teacher_models):
        if (key := _teacher_key(index)) in missing or (no_tokenizer and teacher.model_path is not None):
            preset = matching_preset(teacher.model_path or "", key)
            replacements.append(f"{key}={teacher.model_path}: preset {preset} is used, with random weights")
            teacher = replace(teacher, model_path=None, preset=preset)
        teachers.append(teacher)
    distillation = replace(config.distillation, teacher_models=teachers)
    return (
        replace(
            config, model=model, data=data, reference=reference, critic=critic, rollout=rollout,
            distillation=distillation, reward=reward,
        ),
        replacements,
    )  # fmt: skip


def with_placeholder_texts(
    config: Config, files: Collection[tuple[str, str]], no_tokenizer: bool
) -> tuple[Config, list[str]]:
    """Replaces missing data files, and a missing tokenizer; returns the config and a line for each replacement.

    Args:
        config: Config whose model exists.
        files: Config key and path of each missing data file.
        no_tokenizer: True to encode texts as bytes. Their lengths then have no effect.
    """
    data, notes = config.data, []
    if no_tokenizer:
        config = replace(config, model=replace(config.model, tokenizer=BYTES))
        notes.append(
            "the tokenizer is missing: lengths in tokens are unknown, so no row is dropped, cut or refused for its "
            "length, and the chat template is not checked; texts are encoded as bytes"
        )
        data = replace(data, chat_template=None, overlong_prompts="truncate_left")
        if config.train.warm_start.num_steps or build(config.algorithm, config.rollout).supervised:
            data = replace(data, overlong_responses="truncate_right")
    lost = [file for key, file in files if key == "data.train_files"]
    if lost:
        notes.append(
            f"data.train_files: '{lost[0]}' is missing: data.task={TASK} is used; columns are not checked, a reward "
            f"that cannot score these rows is 0, and exact_match replaces {', '.join(OF_DATA_SETS)}"
        )
        config = replace(config, reward=_placeholder_reward(config.reward))
        data = DataConfig(task=TASK, shuffle=data.shuffle, overlong_prompts=data.overlong_prompts)
    elif files:
        lost = [file for _, file in files]
        here = [file for file in data.val_files if file not in lost] or data.train_files
        notes.append(f"data.val_files: '{lost[0]}' is missing: {', '.join(here)} is used")
        data = replace(data, val_files=here)
    return replace(config, data=data), notes


def _placeholder_reward(reward: RewardConfig) -> RewardConfig:
    """Returns the rewards for generated rows: samples that a function cannot score get a reward instead of an error."""
    functions = [replace(one, name="exact_match", kwargs={}) if one.name in OF_DATA_SETS else one
                 for one in reward.functions]  # fmt: skip
    value = 0.0 if reward.error_value is None else reward.error_value
    return replace(reward, functions=functions, error_value=value, max_failed_frac=1.0)


def _teacher_key(index: int) -> str:
    return f"distillation.teacher_models[{index}].model_path"


def matching_preset(folder: str, key: str = "model.path") -> str:
    """Returns the longest preset name that the folder's name contains."""
    name = _letters(Path(folder).name)
    found = [preset for preset in PRESETS if _letters(preset) in name]
    if not found:
        raise UserError(
            f"{key}={folder} is missing, and no preset matches its name. Copy its config.json and tokenizer here, or "
            "set the closest preset, with the vocabulary size of the model: ~model model.preset=NAME "
            f"model.overrides.vocab_size=SIZE model.tokenizer={BYTES}, with NAME one of {', '.join(PRESETS)}."
        )
    return max(found, key=len)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
