"""Rules of the section `distillation`, and the assignment of prompts to teachers. Imports no torch."""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from mrl.config.config import (
    TOP_K,
    AlgorithmConfig,
    Config,
    DistillationConfig,
    DistillationLossConfig,
    TeacherConfig,
)
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.validation.parallel import same_layout_rules

if TYPE_CHECKING:
    from mrl.types import Prompt

DATA_SOURCE = "data_source"
"""Default of `teacher_key`: `Prompt.data_source`, which exists even if the row has no such column."""

TASK = (
    "policy_loss", "clip_low", "clip_high", "dual_clip", "sapo", "vespo", "dppo", "clip_cov", "kl_cov", "dro",
    "advantage_std", "advantage_eps", "advantage_std_over",
)  # fmt: skip
"""Fields of `algorithm` that only its advantages and its policy loss read."""


def teacher_index(config: DistillationConfig, prompt: Prompt) -> int:
    """Returns the index of the teacher that scores this prompt's samples.

    Raises:
        UserError: No teacher has the prompt's key.
    """
    if len(config.teacher_models) == 1:
        return 0
    key = prompt.data_source if config.teacher_key == DATA_SOURCE else prompt.row.get(config.teacher_key)
    known = [teacher.key for teacher in config.teacher_models]
    if key not in known:
        raise UserError(
            f"{prompt.source}: column '{config.teacher_key}' (distillation.teacher_key) is {key!r}, but the keys in "
            f"distillation.teacher_models are {', '.join(map(str, known))}. Correct the row, or add a teacher with "
            "this key."
        )
    return known.index(str(key))


def is_frozen_actor(config: Config, teacher: TeacherConfig) -> bool:
    """Returns whether a teacher is the actor's model without its adapters, so that it needs no weights of its own."""
    path = teacher.model_path
    return config.actor.lora.rank > 0 and path is not None and path == config.model.path


def check_distillation(
    config: Config,
    arch: ArchSpec,
    teachers: Sequence[ArchSpec],
    grid: ParallelLayout,
    own: AlgorithmConfig,
    *,
    supervised: bool,
    critic: bool,
) -> None:
    """Checks the section `distillation`.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Architecture of the student.
        teachers: Architectures of the teachers, in the config's order; empty if distillation is disabled.
        grid: Parallel layout of student and teachers.
        own: Section `algorithm` with the algorithm's defaults only, to find fields that the user set.
        supervised: True for an algorithm that does not sample.
        critic: True for an algorithm with a critic.

    Raises:
        UserError: The first broken rule.
    """
    distilled = config.distillation
    rules = (
        [_enabled_rules(config, own, supervised=supervised, critic=critic), _loss_rules(distilled.distillation_loss)]
        if distilled.enabled
        else [_idle(distilled)]
    )
    for message in itertools.chain(*rules):
        raise UserError(message)
    loss, smallest = distilled.distillation_loss, min(each.vocab_size for each in (arch, *teachers))
    if loss.loss_mode == TOP_K and loss.topk > smallest:
        raise UserError(
            f"distillation.distillation_loss.topk={loss.topk} is more than the {smallest} tokens of the vocabulary. "
            "Lower it."
        )
    for index, teacher in enumerate(teachers):
        named = distilled.teacher_models[index]
        for message in _model_rules(config, arch, teacher, grid, preset=named.preset is not None):
            name = f"preset={named.preset}" if named.model_path is None else f"model_path={named.model_path}"
            raise UserError(f"distillation.teacher_models[{index}].{name}{message}")


def check_named(config: Config) -> None:
    """Checks the list of teachers without reading their models.

    Raises:
        UserError: The first broken rule.
    """
    if not config.distillation.enabled:
        return
    teachers = config.distillation.teacher_models
    if not teachers:
        raise UserError(
            "distillation.enabled is true, but distillation.teacher_models is empty. Add a teacher, such as "
            "distillation.teacher_models=[{model_path: FOLDER}]."
        )
    for index, teacher in enumerate(teachers):
        where = f"distillation.teacher_models[{index}]"
        if (teacher.model_path is None) == (teacher.preset is None):
            came = "neither" if teacher.preset is None else "both"
            raise UserError(
                f"{where}: {came} of model_path and preset set, expected one. Set model_path to a Hugging Face folder, "
                "or preset."
            )
        if teacher.overrides and teacher.preset is None:
            raise UserError(f"{where}.overrides is set, but would have no effect because preset is null. Remove it.")
        if teacher.model_path is not None and not os.path.isdir(teacher.model_path):
            raise UserError(
                f"{where}.model_path={teacher.model_path} is not a folder. Give a local Hugging Face folder."
            )
        if len(teachers) > 1 and teacher.key is None:
            raise UserError(
                f"{where}.key is null, but with several teachers each needs a key that selects its prompts. Set it."
            )
    keys = [teacher.key for teacher in teachers]
    if len(teachers) > 1 and len(set(keys)) < len(keys):
        raise UserError(
            f"distillation.teacher_models: two teachers have the same key ({', '.join(map(str, keys))}). Use different "
            "keys."
        )


def _idle(distilled: DistillationConfig) -> Iterator[str]:
    default = DistillationConfig()
    for item in fields(DistillationConfig):
        if getattr(distilled, item.name) != getattr(default, item.name):
            yield (
                f"distillation.{item.name} is set, but would have no effect because distillation.enabled is false. "
                "Remove it, or change that."
            )


def _enabled_rules(config: Config, own: AlgorithmConfig, *, supervised: bool, critic: bool) -> Iterator[str]:
    distilled, algorithm = config.distillation, config.algorithm
    if supervised:
        yield (
            f"distillation.enabled is true, but algorithm.name={algorithm.name} does not sample, and teachers score "
            "samples of the student. Use another algorithm, such as grpo."
        )
    if len(distilled.teacher_models) == 1:
        for name, ignored in (
            ("teacher_key", distilled.teacher_key != DATA_SOURCE),
            ("teacher_models[0].key", distilled.teacher_models[0].key is not None),
        ):
            if ignored:
                yield (
                    f"distillation.{name} is set, but would have no effect because there is only one teacher. Remove "
                    "it, or add another teacher."
                )
    if not distilled.distillation_loss.use_task_rewards:
        for name in _task_loss_settings(config, own, critic=critic):
            yield (
                f"algorithm.{name} would have no effect because "
                "distillation.distillation_loss.use_task_rewards is false. Remove it, or change that."
            )


def _task_loss_settings(config: Config, own: AlgorithmConfig, *, critic: bool) -> Iterator[str]:
    """Yields the settings in `algorithm` that only the loss on task rewards reads."""
    algorithm, by_gradient = config.algorithm, config.distillation.distillation_loss.use_policy_gradient
    correction = algorithm.rollout_correction.resolved
    for name, is_set in (
        ("kl_in", algorithm.kl_in != "none"),
        ("entropy_coef", algorithm.entropy_coef != 0),
        ("entropy_ctrl.type", algorithm.entropy_ctrl.type != "fixed"),
        ("positive_example_nll_weight", algorithm.positive_example_nll_weight != 0),
        ("top_entropy_quantile", algorithm.top_entropy_quantile != 1),
        ("rollout_correction.loss_type", correction.bypass_mode and correction.loss_type == "reinforce"),
        ("rollout_correction.rollout_is", correction.rollout_is is not None and not by_gradient),
        ("rollout_correction.off_policy_mask_threshold", correction.off_policy_mask_threshold is not None),
        (f"name={algorithm.name}", critic),
    ):
        if is_set:
            yield name
    for name in TASK:
        value = getattr(algorithm, name)
        if value != getattr(own, name):
            yield name if is_dataclass(value) else f"{name}={value}"


def _loss_rules(loss: DistillationLossConfig) -> Iterator[str]:
    mode, default, where = loss.loss_mode, DistillationLossConfig(), "distillation.distillation_loss"
    if loss.use_policy_gradient and not loss.is_sampled:
        yield (
            f"{where}.use_policy_gradient is not supported with loss_mode={mode}: the loss does not depend on the "
            "sampled token, so its policy gradient is 0 on average. Use loss_mode=k1, or set it to false."
        )
    if mode == "k1" and not loss.use_policy_gradient:
        yield (
            f"{where}.loss_mode=k1 has a gradient that does not depend on the teacher. Set "
            f"{where}.use_policy_gradient=true, or use k2, k3 or an exact mode."
        )
    no_pg = "use_policy_gradient is false"
    for name, ignored, why in (
        ("topk", mode != TOP_K, f"loss_mode is {mode}"),
        ("log_prob_min_clamp", mode != TOP_K, f"loss_mode is {mode}"),
        ("beta", mode != "jsd", f"loss_mode is {mode}"),
        ("distillation_loss_coef", not loss.use_task_rewards, "use_task_rewards is false"),
        ("clip_ratio_low", not loss.use_policy_gradient, no_pg),
        ("clip_ratio_high", not loss.use_policy_gradient, no_pg),
    ):
        value = getattr(loss, name)
        if ignored and value != getattr(default, name):
            yield f"{where}.{name}={value} would have no effect because {why}. Remove it, or change that."


def _model_rules(
    config: Config, arch: ArchSpec, teacher: ArchSpec, grid: ParallelLayout, *, preset: bool
) -> Iterator[str]:
    if teacher == arch:
        return
    if preset and teacher.vocab_size != arch.vocab_size:
        yield (
            f" has {teacher.vocab_size} tokens, but the student has {arch.vocab_size}. Remove vocab_size from the "
            "preset's overrides."
        )
    yield from same_layout_rules(config, arch, teacher, grid, host="student", name="teacher")
