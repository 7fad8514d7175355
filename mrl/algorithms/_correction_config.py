"""Parsing and checks of the config section `algorithm.rollout_correction`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from mrl.algorithms.functional.rollout_correction import Rejection, Weighing
from mrl.config.config import RolloutCorrectionConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.config.verl_keys.verl_presets import PRESETS
from mrl.errors import UserError

KEY = "algorithm.rollout_correction"

REINFORCE = "gpg"
"""Policy loss that `loss_type=reinforce` selects."""

TESTS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "binary_kl",
)
"""Tests that `rollout_rs` may list: verl's, and KPop's `binary_kl`."""


@dataclass(frozen=True)
class CorrectionSpec:
    """Parsed config section `algorithm.rollout_correction`.

    Attributes:
        decoupled: True if the log-ratio is that of the proximal policy to the sampler; else that of the current policy.
        reinforce: True if the loss is -w A log pi.
        weighing: Settings of the importance weights; None: no weights.
        rejections: Tests that a token must pass.
        kept_only: True if the loss is averaged over the accepted tokens only.
        off_policy: Threshold of the off-policy sequence mask; None: no mask.
    """

    decoupled: bool
    reinforce: bool
    weighing: Weighing | None
    rejections: tuple[Rejection, ...]
    kept_only: bool
    off_policy: float | None


def parse(config: RolloutCorrectionConfig) -> CorrectionSpec:
    """Parses the section.

    Raises:
        UserError: A preset, test or threshold is unknown or malformed, or a field contradicts the preset.
    """
    _check_preset(config)
    acting = config.resolved
    rejections = _parse_rejections(acting.rollout_rs, acting.rollout_rs_threshold)
    weighing = None
    if acting.rollout_is is not None:
        weighing = _parse_weighing(acting)
    return CorrectionSpec(
        decoupled=not acting.bypass_mode,
        reinforce=is_reinforce(config),
        weighing=weighing,
        rejections=rejections,
        kept_only=acting.rollout_rs_denominator == "kept",
        off_policy=acting.off_policy_mask_threshold,
    )


def unused_fields(config: RolloutCorrectionConfig) -> dict[str, str]:
    """Returns the fields without effect, each with the reason."""
    acting, found = config.resolved, dict[str, str]()
    clips = acting.bypass_mode and acting.loss_type == "ppo_clip"
    if not acting.bypass_mode and acting.loss_type == "reinforce":
        found["loss_type"] = f"{KEY}.bypass_mode is false: the loss is the algorithm's"
    if clips and acting.rollout_is is not None:
        found["rollout_is"] = (
            f"{KEY}.bypass_mode is true and {KEY}.loss_type is not reinforce: the loss's ratio is the weight"
        )
    if acting.rollout_is is None:
        for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
            found[name] = f"{KEY}.rollout_is is null"
    if acting.rollout_rs is None:
        for name in ("rollout_rs_threshold", "rollout_rs_denominator"):
            found[name] = f"{KEY}.rollout_rs is null"
    return {f"rollout_correction.{name}": reason for name, reason in found.items()}


def check_policy_loss(policy_loss: str | None, config: RolloutCorrectionConfig) -> None:
    """Rejects a policy loss together with `loss_type=reinforce`, which already sets the loss."""
    if is_reinforce(config) and policy_loss not in (None, REINFORCE):
        raise UserError(
            f"algorithm.policy_loss={policy_loss} conflicts with {KEY}.loss_type=reinforce, which sets the loss to "
            f"{REINFORCE}. Remove one of the two."
        )


def is_reinforce(config: RolloutCorrectionConfig) -> bool:
    """Returns whether the loss is -w A log pi, without a ratio that could be clipped."""
    acting = config.resolved
    return bool(acting.bypass_mode) and acting.loss_type == "reinforce"


def with_preset(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """Returns the section with the fields of its preset filled in."""
    if config.preset is None:
        return config
    acting = config.resolved
    return replace(acting, loss_type=acting.loss_type if acting.bypass_mode else None)


def _check_preset(config: RolloutCorrectionConfig) -> None:
    if config.preset is None:
        return
    if config.preset not in PRESETS:
        hint = did_you_mean(config.preset, PRESETS)
        raise UserError(f"{KEY}.preset='{config.preset}' is unknown.{hint} Choose one of {', '.join(PRESETS)}.")
    preset: dict[str, Any] = {"loss_type": "ppo_clip"} | PRESETS[config.preset]
    for name in ("bypass_mode", "loss_type", "rollout_is", "rollout_rs"):
        given = getattr(config, name)
        if given is not None and given != preset.get(name):
            own = f"sets it to {preset[name]}" if name in preset else "leaves it null"
            raise UserError(
                f"{KEY}.{name}={given} contradicts {KEY}.preset={config.preset}, which {own}. Remove one of the two; "
                "only thresholds may be set together with a preset."
            )


def _parse_weighing(config: RolloutCorrectionConfig) -> Weighing:
    name, text = f"{KEY}.rollout_is_threshold", config.rollout_is_threshold or ""
    lower, upper = _parse_bounds(name, text, "one number above 0 such as 2.0, or two such as 0.5_5.0 (IcePop)")
    level: Any = config.rollout_is
    return Weighing(level, upper, lower, config.rollout_is_batch_normalize)


def _parse_rejections(listed: str | None, thresholds: str | None) -> tuple[Rejection, ...]:
    if listed is None:
        return ()
    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    for name in names:
        if name not in TESTS:
            hint = did_you_mean(name, TESTS)
            raise UserError(f"{KEY}.rollout_rs has unknown test '{name}', expected some of {', '.join(TESTS)}.{hint}")
    key = f"{KEY}.rollout_rs_threshold"
    if not names:
        raise UserError(f"{KEY}.rollout_rs='{listed}' names no test. Use null, or a comma list of {', '.join(TESTS)}.")
    if thresholds is None:
        raise UserError(f"{KEY}.rollout_rs={listed} needs {key}: one bound for all tests, or a comma list of bounds.")
    texts = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise UserError(f"{key}='{thresholds}' has {len(texts)} bounds for {len(names)} tests: set 1 or {len(names)}.")
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_parse_rejection(key, name, text) for name, text in zip(names, texts, strict=True))


def _parse_rejection(key: str, name: str, text: str) -> Rejection:
    level: Any = "token" if name == "binary_kl" else name.rpartition("_")[0]
    kind: Any = name if name == "binary_kl" else name.rpartition("_")[2]
    if kind == "k1":
        lower, upper = _parse_bounds(key, text, f"for {name} one number above 0 such as 1.2, or two such as 0.5_2.0")
        lower = 1.0 / upper if lower is None else lower
        if lower > upper:
            raise UserError(
                f"{key}: '{text}' for {name} means the empty range {lower:g} to {upper:g}. Set one number >= 1."
            )
        return Rejection(name, level, kind, math.log(upper), math.log(lower))
    lower, upper = _parse_bounds(key, text, f"for {name} one number above 0, the largest value that is kept")
    if lower is not None:
        raise UserError(f"{key}: '{text}' for {name} has two bounds, expected one: the largest value that is kept.")
    return Rejection(name, level, kind, upper)


def _parse_bounds(key: str, text: str, expected: str) -> tuple[float | None, float]:
    """Parses "upper" or "lower_upper"; the lower bound may be None."""
    number = r"\d*\.?\d+(?:[eE][-+]?\d+)?|\d+\."
    match = re.fullmatch(rf"(?:({number})_)?({number})", text.strip())
    values = [float(part) for part in match.groups() if part is not None] if match else []
    if not values or not all(0 < value < math.inf for value in values) or values[0] > values[-1]:
        raise UserError(f"{key}='{text}' is invalid, expected {expected}.")
    return (values[0] if len(values) == 2 else None), values[-1]
