"""Rotary settings of a config.json, in both spellings.

Transformers 5 writes `rope_parameters`; older versions write `rope_theta` and `rope_scaling`, which transformers 5 also
reads, in preference to `rope_parameters`. A file in which the two disagree is refused, since it describes different
models to different versions. Both are written, so that every version can load the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._values import positive_float, positive_int
from mrl.models.base import ArchSpec, RopeScaling

ROPE_KEYS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Keys of config.json that this file reads."""

_PARTS = {
    "default": ("rope_theta", "partial_rotary_factor"),
    "llama3": (
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Supported rotary types -> settings allowed in addition to the type."""


def read_rope(
    config: Mapping[str, Any], defaults: Mapping[str, Any], types: tuple[str, ...]
) -> tuple[float, RopeScaling | None]:
    """Returns (rope_theta, scaling) of a config.json.

    Args:
        config: Parsed config.json.
        defaults: Values that transformers assumes for missing keys; "rope_theta" is used.
        types: Rotary types that the family has, out of "default" and "llama3".

    Raises:
        UserError: Unsupported rotary type, a missing or unknown setting, or two spellings that disagree.
    """
    _refuse_partial_rotation(config)
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            found[key] = _read(config, key, defaults, types)
    if not found:
        return positive_float(config, "rope_theta", defaults), None
    (first, settings), *others = found.items()
    for other, different in others:
        if different != settings:
            raise UserError(
                f"config.json: {first} ({shown(config[first])}) and {other} ({shown(config[other])}) disagree with "
                f"rope_theta={shown(config.get('rope_theta'))}: different versions of transformers would read "
                "different models. Remove the wrong one."
            )
    return settings


def write_rope(arch: ArchSpec) -> dict[str, Any]:
    """Returns the rotary settings of a model as keys of config.json, in both spellings."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": arch.rope_theta}
    if arch.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(arch.rope_scaling)}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": rope,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling if arch.rope_scaling is not None else None,
    }


def _read(
    config: Mapping[str, Any], key: str, defaults: Mapping[str, Any], types: tuple[str, ...]
) -> tuple[float, RopeScaling | None]:
    rope = config[key]
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: {key} is {shown(rope)}; expected an object with 'rope_type'.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "type" in rope and rope["type"] != kind:
        raise UserError(f"config.json: {key} has rope_type={shown(kind)} and type={shown(rope['type'])}. Keep one.")
    if kind not in types:
        raise UserError(
            f"config.json: rope_type is {shown(kind)} in {key}; mrl supports {' and '.join(map(repr, types))}."
        )
    unknown = [part for part in rope if part not in (*_PARTS[kind], "rope_type", "type") and rope[part] is not None]
    if unknown:
        raise UserError(
            f"config.json: {key} has {shown(unknown[0])}, which rope_type '{kind}' does not have (it has "
            f"{', '.join(_PARTS[kind])}). Remove it, or use a model with another rope_type."
        )
    _refuse_partial_rotation(rope)
    theta = _theta(config, key, rope, defaults)
    return theta, None if kind == "default" else _llama3(config, key, rope)


def _refuse_partial_rotation(settings: Mapping[str, Any]) -> None:
    factor = settings.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise UserError(f"config.json: partial_rotary_factor is {shown(factor)}; mrl supports only 1.")


def _theta(config: Mapping[str, Any], key: str, rope: Mapping[str, Any], defaults: Mapping[str, Any]) -> float:
    nested = positive_float(rope, "rope_theta", {}) if "rope_theta" in rope else None
    top_level = positive_float(config, "rope_theta", {}) if "rope_theta" in config else None
    if nested is not None and top_level is not None and nested != top_level:
        raise UserError(
            f"config.json: rope_theta is {top_level}, and {nested} in {key}: different versions of transformers would "
            "read different models. Remove the wrong one."
        )
    if nested is not None:
        return nested
    return positive_float(defaults, "rope_theta", {}) if top_level is None else top_level


def _llama3(config: Mapping[str, Any], key: str, rope: Mapping[str, Any]) -> RopeScaling:
    longest = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    top_level = config.get("original_max_position_embeddings")
    if top_level is not None and top_level != rope.get("original_max_position_embeddings"):
        raise UserError(
            f"config.json: original_max_position_embeddings is {shown(top_level)}, and "
            f"{shown(rope.get('original_max_position_embeddings'))} in {key}. Keep the one in {key}."
        )
    return RopeScaling(
        factor=positive_float(rope, "factor", {}),
        low_freq_factor=positive_float(rope, "low_freq_factor", {}),
        high_freq_factor=positive_float(rope, "high_freq_factor", {}),
        original_max_position_embeddings=positive_int(rope, "original_max_position_embeddings", longest),
    )
