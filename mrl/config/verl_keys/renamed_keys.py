"""Keys of earlier verl versions, and their names in verl 0.9.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ACTOR = "actor_rollout_ref.actor."

RENAMED: dict[str, str] = {
    f"{_ACTOR}optim.warmup_style": f"{_ACTOR}optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    **{f"{_ACTOR}router_replay.{name}": f"{_ACTOR}megatron.router_replay.{name}"
       for name in ("mode", "record_file", "replay_file")},
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.rollout_correction.bypass_mode",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "reward_manager.name": "reward.reward_manager.name",
    "reward_manager.module.path": "reward.reward_manager.module.path",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
}  # fmt: skip
"""Earlier key -> current key."""

TOKEN_LEVEL = f"{_ACTOR}use_token_level_loss"
REJECTION = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""`rollout_rs` of verl 0.7 -> that of 0.9.1, where a threshold has both bounds."""
_SECTION = "algorithm.rollout_correction."
_CORRECTION = f"{_SECTION}rollout_rs"
_CAP = f"{_ACTOR}tis_imp_ratio_cap"
_IS = "algorithm.rollout_is"
_IS_KEYS = (_IS, *(f"{_IS}_{name}" for name in ("threshold", "threshold_lower", "level", "mode")))
_POLICY_GRADIENT = f"{_SECTION}use_policy_gradient"
AGGREGATION = f"{_ACTOR}loss_agg_mode"


def with_current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by the names of verl 0.9.1; if both names are set, the newer one wins."""
    found = _weights(given)
    for key, value in given.items():
        if key == TOKEN_LEVEL and isinstance(value, bool):
            found.setdefault(AGGREGATION, "token-mean" if value else "seq-mean-token-mean")
        elif key in RENAMED and value is not None:
            found.setdefault(RENAMED[key], value)
    rejection = given.get(_CORRECTION)
    if rejection in REJECTION:
        upper, lower = (given.get(f"{_CORRECTION}_threshold{side}") for side in ("", "_lower"))
        upper = 2.0 if upper is None else upper
        bounds = {_CORRECTION: REJECTION[rejection]}
        if isinstance(upper, (int, float)):
            bounds[f"{_CORRECTION}_threshold"] = f"{1 / upper if lower is None else lower:.6g}_{upper:.6g}"
        given = {key: value for key, value in given.items() if key != f"{_CORRECTION}_threshold_lower"} | bounds
    gone = {*RENAMED, TOKEN_LEVEL, _CAP, _POLICY_GRADIENT, *(_IS_KEYS if _IS in given and _is_read(given) else ())}
    return found | {key: value for key, value in given.items() if key not in gone}


def _weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the corrections of verl 0.5 (`tis_imp_ratio_cap`), 0.6 (`rollout_is`) and 0.7 (`use_policy_gradient`)."""
    found: dict[str, Any] = {}
    cap, threshold = given.get(_CAP), given.get(f"{_IS}_threshold")
    if isinstance(cap, (int, float)) and cap > 0:
        found = {f"{_SECTION}rollout_is": "token", f"{_SECTION}rollout_is_threshold": cap}
    elif given.get(_IS) is True and threshold is not None and _is_read(given):
        level = given.get(f"{_IS}_level", "token")
        found = {f"{_SECTION}rollout_is": level, f"{_SECTION}rollout_is_threshold": threshold}
    if given.get(_POLICY_GRADIENT) is True:
        found[f"{_SECTION}loss_type"] = "reinforce"
    return found


def _is_read(given: Mapping[str, Any]) -> bool:
    """Returns whether mrl has the importance weights that verl 0.6 reads, or verl reads none."""
    if given.get(_IS) is not True or given.get(f"{_IS}_threshold") is None:
        return True
    level, mode = given.get(f"{_IS}_level", "token"), given.get(f"{_IS}_mode", "truncate")
    return level in ("token", "sequence") and mode == "truncate"
