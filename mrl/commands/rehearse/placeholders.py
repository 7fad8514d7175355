"""What takes the place of files that are on the cluster and not here, where the user allows it.

Owns which paths of a config are missing, and the config without them: a preset of the same size by the folder's name,
a character tokenizer, generated prompts.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mrl.checkpoint.formats.hub import local_folder
from mrl.commands.rehearse.engine import NATIVE
from mrl.config.config import Config, DataConfig, RewardFunctionConfig, RewardModelConfig
from mrl.config.paths import CHAR_PREFIX
from mrl.errors import UserError
from mrl.models.presets import PRESETS

TASK = "addition"
CHARACTERS = f"{CHAR_PREFIX}0123456789<>+=#"
FLAG = "--stand-ins"


def missing_paths(config: Config) -> dict[str, str]:
    """Key -> the first path of it that does not exist here."""
    found: dict[str, str] = {}
    for key, path in _missing(config):
        found.setdefault(key, path)
    return found


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
        if folder is not None and not folder.startswith(CHAR_PREFIX) and not _is_here(key, folder):
            yield key, folder
    for index, teacher in enumerate(config.distillation.teacher_models):
        key = _teacher_key(index)
        if teacher.model_path is not None and not _is_here(key, teacher.model_path):
            yield key, teacher.model_path
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        yield from ((key, file) for file in files if not os.path.isfile(file))


def _is_here(key: str, folder: str) -> bool:
    try:
        return os.path.isdir(local_folder(key, folder, weights=key != "model.tokenizer") or "")
    except UserError:
        return False


def with_stand_ins(config: Config) -> tuple[Config, list[str]]:
    """The config without what is missing, and what stands in for it, in words.

    Raises:
        UserError: There is no preset of the missing model.
    """
    missing = missing_paths(config)
    told = []
    model, data = config.model, config.data
    no_tokenizer = "model.tokenizer" in missing or (model.tokenizer is None and "model.path" in missing)
    if "model.path" in missing:
        preset = _preset_of(missing["model.path"])
        told.append(f"model.path={model.path} is not here: the preset {preset} stands in, with random weights")
        sizes = {"vocab_size": PRESETS[preset]["vocab_size"]}
        model = replace(model, path=None, preset=preset, overrides=sizes)
    if no_tokenizer:
        told.append(f"its tokenizer is not here: characters stand in ({CHARACTERS})")
        model = replace(model, tokenizer=CHARACTERS)
    if "reference.path" in missing:
        told.append(f"reference.path={config.reference.path} is not here: the first weights are the reference")
    if "critic.path" in missing:
        told.append(f"critic.path={config.critic.path} is not here: the critic starts from the actor")
    if missing.keys() & {"data.train_files", "data.val_files"} or (no_tokenizer and data.task is None):
        keys = [key for key in ("data.train_files", "data.val_files") if key in missing]
        why = f"{keys[0]}: '{missing[keys[0]]}' is not here" if keys else "the data need the tokenizer that is not here"
        told.append(f"{why}: sums stand in for all prompts (data.task={TASK}); templates and columns are not rehearsed")
        data = DataConfig(task=TASK, shuffle=data.shuffle, overlong_prompts=data.overlong_prompts)
    rollout = config.rollout
    if "rollout.engine_dir" in missing:
        told.append(f"rollout.engine_dir={rollout.engine_dir} is not here: its engines are not compared with the run")
        rollout = replace(rollout, name=NATIVE, engine_dir=None, pipeline_model_parallel_size=1)
    reference = replace(config.reference, path=None) if "reference.path" in missing else config.reference
    critic = replace(config.critic, path=None) if "critic.path" in missing else config.critic
    reward = config.reward
    if "reward.model.path" in missing:
        told.append(f"reward.model.path={reward.model.path} is not here: samples are rewarded without it")
        functions = reward.functions or [RewardFunctionConfig()]
        reward = replace(reward, model=RewardModelConfig(), functions=functions)
    teachers = []
    for index, teacher in enumerate(config.distillation.teacher_models):
        if (key := _teacher_key(index)) in missing or (no_tokenizer and teacher.model_path is not None):
            preset = _preset_of(teacher.model_path or "", key)
            told.append(f"{key}={teacher.model_path}: the preset {preset} stands in, with random weights")
            teacher = replace(teacher, model_path=None, preset=preset)
        teachers.append(teacher)
    distillation = replace(config.distillation, teacher_models=teachers)
    return (
        replace(
            config, model=model, data=data, reference=reference, critic=critic, rollout=rollout,
            distillation=distillation, reward=reward,
        ),
        told,
    )  # fmt: skip


def _teacher_key(index: int) -> str:
    return f"distillation.teacher_models[{index}].model_path"


def _preset_of(folder: str, key: str = "model.path") -> str:
    """The preset with the longest name that is in the folder's."""
    name = _letters(Path(folder).name)
    found = [preset for preset in PRESETS if _letters(preset) in name]
    if not found:
        raise UserError(
            f"{key}={folder} is not here, and no preset has its name, so that nothing can stand in. Copy its "
            "config.json and tokenizer here, or name what is nearest: ~model model.preset=NAME model.tokenizer=..., "
            f"with NAME of {', '.join(PRESETS)}."
        )
    return max(found, key=len)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
