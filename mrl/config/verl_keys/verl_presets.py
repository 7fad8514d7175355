"""Presets of verl's rollout correction, as values of `algorithm.rollout_correction`.

They are the class methods of `RolloutCorrectionConfig` (verl 0.9.1, verl/trainer/config/algorithm.py).
"""

from __future__ import annotations

from typing import Any

TOKEN: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "2.0"}
SEQUENCE: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": "2.0"}
ICEPOP: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
SUM: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
GEO: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}

DECOUPLED: dict[str, Any] = {"bypass_mode": False}
CLIPPED: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": DECOUPLED | TOKEN,
    "decoupled_seq_is": DECOUPLED | SEQUENCE,
    "decoupled_token_icepop": DECOUPLED | ICEPOP,
    "decoupled_seq_is_rs": DECOUPLED | SEQUENCE | SUM,
    "decoupled_geo_rs": DECOUPLED | GEO,
    "decoupled_geo_rs_seq_tis": DECOUPLED | SEQUENCE | GEO,
    "decoupled_geo_rs_token_tis": DECOUPLED | TOKEN | GEO,
    "decoupled_k3_rs": DECOUPLED | K3,
    "decoupled_k3_rs_seq_tis": DECOUPLED | SEQUENCE | K3,
    "decoupled_k3_rs_token_tis": DECOUPLED | TOKEN | K3,
    "bypass_ppo_clip": CLIPPED,
    "bypass_ppo_clip_geo_rs": CLIPPED | GEO,
    "bypass_ppo_clip_k3_rs": CLIPPED | K3,
    "bypass_pg_is": REINFORCE | SEQUENCE,
    "bypass_pg_token_icepop": REINFORCE | ICEPOP,
    "bypass_pg_geo_rs": REINFORCE | GEO,
    "bypass_pg_geo_rs_seq_tis": REINFORCE | SEQUENCE | GEO,
    "bypass_pg_geo_rs_token_tis": REINFORCE | TOKEN | GEO,
    "disabled": DECOUPLED,
}
"""Preset -> fields of `algorithm.rollout_correction` that it sets."""
