"""Keys of earlier verl versions, and their names in verl 0.9.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ACTOR = "actor_rollout_ref.actor."

RENAMED: dict[str, str] = {
    f"{_ACTOR}optim.warmup_style": f"{_ACTOR}optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
}
"""Earlier key -> current key."""

TOKEN_LEVEL = f"{_ACTOR}use_token_level_loss"
REJECTION = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""`rollout_rs` of verl 0.7 -> that of 0.9.1, where a threshold has both bounds."""
_CORRECTION = "algorithm.rollout_correction.rollout_rs"
AGGREGATION = f"{_ACTOR}loss_agg_mode"


def with_current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by the names of verl 0.9.1; if both names are set, the newer one wins."""
    found: dict[str, Any] = {}
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
    return found | {key: value for key, value in given.items() if key not in RENAMED and key != TOKEN_LEVEL}
