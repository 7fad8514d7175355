"""Translates verl's `distillation.*`: the teachers and the loss; verl reads it only with `distillation.enabled`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.config import TOP_K
from mrl.config.verl_keys.verl_distillation import TEACHERS
from mrl.trainer.validation.distillation import TASK

ROOT = "distillation."
LOSS = f"{ROOT}distillation_loss."
MODES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs", TOP_K: TOP_K}
OWN = "teacher_model"
"""Placeholder teacher of verl's config file, dropped if other teachers are named."""


def distillation(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields keys of mrl and their values."""
    if not verl[f"{ROOT}enabled"]:
        return
    yield f"{ROOT}enabled", True
    teachers = _teachers(verl)
    yield f"{ROOT}teacher_models", teachers
    if len(teachers) > 1:
        yield f"{ROOT}teacher_key", verl[f"{ROOT}teacher_key"]
    mode = verl.one_of(f"{LOSS}loss_mode", MODES, "k3")
    yield f"{LOSS}loss_mode", mode
    by_gradient = verl[f"{LOSS}use_policy_gradient"]
    if by_gradient and mode == TOP_K:
        verl.notes[f"{LOSS}use_policy_gradient"] = "the loss itself is minimized: its policy gradient is 0 on average"
        by_gradient = False
    alone = not verl[f"{LOSS}use_task_rewards"]
    read = ["use_task_rewards", "loss_max_clamp"]
    read += [] if alone else ["distillation_loss_coef"]
    read += ["topk", "log_prob_min_clamp"] if mode == TOP_K else []
    read += ["clip_ratio_low", "clip_ratio_high"] if by_gradient else []
    yield from ((f"{LOSS}{name}", verl[f"{LOSS}{name}"]) for name in read)
    yield f"{LOSS}use_policy_gradient", by_gradient


def without_the_task(verl: VerlRun, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields `pairs` without settings of the task loss, which verl ignores if only the distillation is minimized."""
    if not verl[f"{ROOT}enabled"] or verl[f"{LOSS}use_task_rewards"]:
        yield from pairs
        return
    idle = (*TASK, "kl_in", "kl_coef", "kl_estimator", "kl_ctrl", "entropy_coef", "rollout_correction.loss_type")
    weights = "algorithm.rollout_correction.rollout_is"
    for key, value in pairs:
        weighs = key.startswith(weights) and not verl[f"{LOSS}use_policy_gradient"]
        if not weighs and not any(f"{key}.".startswith(f"algorithm.{name}.") for name in idle):
            yield key, value
        elif value and key in ("algorithm.policy_loss", "algorithm.kl_in", "algorithm.entropy_coef", weights):
            verl.notes[key] = "left out: only the distillation loss is minimized (use_task_rewards is false)"
            verl.lossless.add(key)  # verl ignores it too


def _teachers(verl: VerlRun) -> list[dict[str, str]]:
    """Returns the entries of `teacher_models`, in the order of their names in the settings."""
    named: dict[str, dict[str, str]] = {}
    for key, value in verl.under(TEACHERS).items():
        name, _, field = key.partition(".")
        if field in ("key", "model_path") and value is not None:
            named.setdefault(name, {})[field] = str(value)
    if len(named) > 1:
        named.pop(OWN, None)
    if len(named) == 1:
        named = {name: {"model_path": fields.get("model_path", "")} for name, fields in named.items()}
    return list(named.values())
