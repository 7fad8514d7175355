"""Verdicts on the keys of verl's `distillation` section."""

from __future__ import annotations

import re
from typing import Any

TEACHERS = "distillation.teacher_models."
"""Prefix of a teacher's keys, followed by a name of the user's choice; verl's default is `teacher_model`."""

_LOSS = "distillation.distillation_loss."

MAPS: dict[str, tuple[str, Any, str]] = {
    "distillation.enabled": ("distillation.enabled", False, ""),
    f"{TEACHERS}teacher_model.key": ("distillation.teacher_models", None, "a list here: `key` of an entry"),
    f"{TEACHERS}teacher_model.model_path": ("distillation.teacher_models", None, "`model_path` of an entry"),
    "distillation.teacher_key": ("distillation.teacher_key", "data_source", "read where there are several teachers"),
    f"{_LOSS}loss_mode": (
        f"{_LOSS}loss_mode", "k3", "`kl` is `k1`, `mse` is `k2`, `low_var_kl` is `k3`"
    ),
    f"{_LOSS}topk": (f"{_LOSS}topk", 32, "of `forward_kl_topk`"),
    f"{_LOSS}use_task_rewards": (f"{_LOSS}use_task_rewards", True, ""),
    f"{_LOSS}distillation_loss_coef": (f"{_LOSS}distillation_loss_coef", 1.0, ""),
    f"{_LOSS}loss_max_clamp": (f"{_LOSS}loss_max_clamp", None, ""),
    f"{_LOSS}log_prob_min_clamp": (f"{_LOSS}log_prob_min_clamp", None, ""),
    f"{_LOSS}use_policy_gradient": (
        f"{_LOSS}use_policy_gradient", False, "not of `forward_kl_topk`"
    ),
    f"{_LOSS}clip_ratio_low": (f"{_LOSS}clip_ratio_low", 0.2, ""),
    f"{_LOSS}clip_ratio_high": (f"{_LOSS}clip_ratio_high", 0.2, ""),
}  # fmt: skip
"""Key -> (mrl's key, verl's default, how values differ)."""

_RANKS = "teachers run on the student's ranks, in its layout, alternating with it"

MOOT: dict[str, str] = {
    "distillation.n_gpus_per_node": _RANKS,
    "distillation.nnodes": _RANKS,
    f"{TEACHERS}*.num_replicas": _RANKS,
    f"{TEACHERS}*.inference*": "a teacher runs forward in Megatron, not in an engine",
    f"{_LOSS}clip_ratio": "verl reads `clip_ratio_low` and `clip_ratio_high`",
    f"{_LOSS}policy_loss_mode": "the clipped surrogate, which is verl's only one too",
    f"{_LOSS}*chunked_topk*": "always in chunks of `actor.logprob_chunk_tokens`",
}
"""Pattern -> why it needs no counterpart."""


def of_any_teacher(key: str) -> str:
    """Returns a key of any teacher as that of `teacher_model`; other keys unchanged."""
    return re.sub(rf"^({re.escape(TEACHERS)})[^.]+\.", r"\1teacher_model.", key)
