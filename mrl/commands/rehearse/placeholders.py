"""Placeholders for files that exist only on the cluster.

A model is replaced by the preset that its folder's name contains, a tokenizer by a character tokenizer, prompts by
generated ones.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mrl.checkpoint.formats.hub import resolve_model_path
from mrl.commands.rehearse.engine import DEFAULT_ENGINE
from mrl.config.config import Config, DataConfig, RewardFunctionConfig, RewardModelConfig
from mrl.config.paths import CHAR_PREFIX
from mrl.data.hub_files import is_local
from mrl.errors import UserError
from mrl.models.presets import PRESETS

TASK = "addition"
CHARACTERS = f"{CHAR_PREFIX}0123456789<>+=#"
FLAG = "--stand-ins"


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
        if folder is not None and not folder.startswith(CHAR_PREFIX) and not _exists(key, folder):
            yield key, folder
    for index, teacher in enumerate(config.distillation.teacher_models):
        key = _teacher_key(index)
        if teacher.model_path is not None and not _exists(key, teacher.model_path):
            yield key, teacher.model_path
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        yield from ((key, file) for file in files if not is_local(key, file))


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
    model, data = config.model, config.data
    no_tokenizer = "model.tokenizer" in missing or (model.tokenizer is None and "model.path" in missing)
    if "model.path" in missing:
        preset = matching_preset(missing["model.path"])
        replacements.append(f"model.path={model.path} is missing: preset {preset} is used, with random weights")
        sizes = {"vocab_size": PRESETS[preset]["vocab_size"]}
        model = replace(model, path=None, preset=preset, overrides=sizes)
    if no_tokenizer:
        replacements.append(f"its tokenizer is missing: a character tokenizer is used ({CHARACTERS})")
        model = replace(model, tokenizer=CHARACTERS)
    if "reference.path" in missing:
        replacements.append(f"reference.path={config.reference.path} is missing: the initial actor is the reference")
    if "critic.path" in missing:
        replacements.append(f"critic.path={config.critic.path} is missing: the critic starts from the actor")
    if missing.keys() & {"data.train_files", "data.val_files"} or (no_tokenizer and data.task is None):
        keys = [key for key in ("data.train_files", "data.val_files") if key in missing]
        why = f"{keys[0]}: '{missing[keys[0]]}' is missing" if keys else "the data require the missing tokenizer"
        replacements.append(f"{why}: data.task={TASK} is used; templates and columns are not rehearsed")
        data = DataConfig(task=TASK, shuffle=data.shuffle, overlong_prompts=data.overlong_prompts)
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
            f"model.overrides.vocab_size=SIZE model.tokenizer=..., with NAME one of {', '.join(PRESETS)}."
        )
    return max(found, key=len)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
