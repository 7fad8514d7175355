"""What `algorithm.rollout_correction` asks for, read from its texts.

Owns the syntax of thresholds and lists of tests, what a preset allows beside it, and which fields have no effect.
"""

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
"""The policy loss of `loss_type=reinforce`."""

TESTS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "binary_kl",
)
"""What `rollout_rs` may list: verl's, and KPop's."""


@dataclass(frozen=True)
class Asked:
    """The section as it acts.

    Attributes:
        decoupled: The log-ratio is the proximal policy's to the sampler's; else that of the policy in training.
        reinforce: The loss is -w A log pi.
        weighing: Of the importance weights; None: no weights.
        rejections: Tests that a token must pass.
        kept_only: Rejected tokens are not among those that the loss is a mean over.
        off_policy: Threshold of the off-policy sequence mask.
    """

    decoupled: bool
    reinforce: bool
    weighing: Weighing | None
    rejections: tuple[Rejection, ...]
    kept_only: bool
    off_policy: float | None


def read(config: RolloutCorrectionConfig) -> Asked:
    """The section, its texts understood.

    Raises:
        UserError: An unknown preset or test, a threshold that is none, or a field that the preset sets otherwise.
    """
    _check_preset(config)
    acting = config.acting
    rejections = _rejections(acting.rollout_rs, acting.rollout_rs_threshold)
    weighing = None
    if acting.rollout_is is not None:
        weighing = _weighing(acting)
    return Asked(
        decoupled=not acting.bypass_mode,
        reinforce=is_reinforce(config),
        weighing=weighing,
        rejections=rejections,
        kept_only=acting.rollout_rs_denominator == "kept",
        off_policy=acting.off_policy_mask_threshold,
    )


def idle(config: RolloutCorrectionConfig) -> dict[str, str]:
    """Fields without effect, each with the reason."""
    acting, found = config.acting, dict[str, str]()
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
    """Refuses a policy loss beside REINFORCE, which is one."""
    if is_reinforce(config) and policy_loss not in (None, REINFORCE):
        raise UserError(
            f"algorithm.policy_loss={policy_loss} came beside {KEY}.loss_type=reinforce, whose loss is {REINFORCE}. "
            "Remove one of both."
        )


def is_reinforce(config: RolloutCorrectionConfig) -> bool:
    """Whether the loss is -w A log pi, without a ratio that could be clipped."""
    acting = config.acting
    return bool(acting.bypass_mode) and acting.loss_type == "reinforce"


def filled(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The section with the fields of its preset."""
    if config.preset is None:
        return config
    acting = config.acting
    return replace(acting, loss_type=acting.loss_type if acting.bypass_mode else None)


def _check_preset(config: RolloutCorrectionConfig) -> None:
    if config.preset is None:
        return
    if config.preset not in PRESETS:
        hint = did_you_mean(config.preset, PRESETS)
        raise UserError(f"{KEY}.preset='{config.preset}' is unknown.{hint} There are: {', '.join(PRESETS)}.")
    preset: dict[str, Any] = {"loss_type": "ppo_clip"} | PRESETS[config.preset]
    for name in ("bypass_mode", "loss_type", "rollout_is", "rollout_rs"):
        given = getattr(config, name)
        if given is not None and given != preset.get(name):
            own = f"sets it to {preset[name]}" if name in preset else "leaves it null"
            raise UserError(
                f"{KEY}.{name}={given} came beside {KEY}.preset={config.preset}, which {own}. Remove one of both; only "
                "thresholds may differ from a preset's."
            )


def _weighing(config: RolloutCorrectionConfig) -> Weighing:
    name, text = f"{KEY}.rollout_is_threshold", config.rollout_is_threshold or ""
    lower, upper = _bounds(name, text, "one number above 0 such as 2.0, or two such as 0.5_5.0 (IcePop)")
    level: Any = config.rollout_is
    return Weighing(level, upper, lower, config.rollout_is_batch_normalize)


def _rejections(listed: str | None, thresholds: str | None) -> tuple[Rejection, ...]:
    if listed is None:
        return ()
    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    for name in names:
        if name not in TESTS:
            hint = did_you_mean(name, TESTS)
            raise UserError(f"{KEY}.rollout_rs has '{name}', expected some of {', '.join(TESTS)}.{hint}")
    key = f"{KEY}.rollout_rs_threshold"
    if not names:
        raise UserError(f"{KEY}.rollout_rs='{listed}' names no test. Use null, or a comma list of {', '.join(TESTS)}.")
    if thresholds is None:
        raise UserError(f"{KEY}.rollout_rs={listed} needs {key}: a bound for each, comma separated, or one for all.")
    texts = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise UserError(f"{key}='{thresholds}' has {len(texts)} bounds for {len(names)} tests; give one, or as many.")
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_rejection(key, name, text) for name, text in zip(names, texts, strict=True))


def _rejection(key: str, name: str, text: str) -> Rejection:
    level: Any = "token" if name == "binary_kl" else name.rpartition("_")[0]
    kind: Any = name if name == "binary_kl" else name.rpartition("_")[2]
    if kind == "k1":
        lower, upper = _bounds(key, text, f"for {name} one number above 0 such as 1.2, or two such as 0.5_2.0")
        lower = 1.0 / upper if lower is None else lower
        if lower > upper:
            raise UserError(f"{key}: '{text}' for {name} means {lower:g} to {upper:g}; give one number of at least 1.")
        return Rejection(name, level, kind, math.log(upper), math.log(lower))
    lower, upper = _bounds(key, text, f"for {name} one number above 0, the largest value that is kept")
    if lower is not None:
        raise UserError(f"{key}: '{text}' for {name} has two bounds; it takes one, the largest value that is kept.")
    return Rejection(name, level, kind, upper)


def _bounds(key: str, text: str, expected: str) -> tuple[float | None, float]:
    """Bounds, the lower maybe None, of "upper" or "lower_upper"."""
    number = r"\d*\.?\d+(?:[eE][-+]?\d+)?|\d+\."
    match = re.fullmatch(rf"(?:({number})_)?({number})", text.strip())
    values = [float(part) for part in match.groups() if part is not None] if match else []
    if not values or not all(0 < value < math.inf for value in values) or values[0] > values[-1]:
        raise UserError(f"{key}='{text}' came, expected {expected}.")
    return (values[0] if len(values) == 2 else None), values[-1]
