"""The rotary settings of a config.json, in both spellings.

Transformers 5 keeps them in `rope_parameters`; older versions in `rope_theta` beside `rope_scaling`, which transformers
5 reads too, and then in place of `rope_parameters`. Both are read; a file in which they disagree would be another model
in another version, and is refused. Both are written, so that either version loads the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._values import real, whole
from mrl.models.base import ArchSpec, RopeScaling

ROPE_KEYS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""The keys of config.json that this file reads."""

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
"""The rotary types that mrl builds -> what may stand beside the type."""


def read_rope(
    config: Mapping[str, Any], defaults: Mapping[str, Any], types: tuple[str, ...]
) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) that a config.json asks for.

    Args:
        config: The parsed file.
        defaults: What transformers assumes; its `rope_theta`.
        types: Of the family, among "default" and "llama3".

    Raises:
        UserError: A rotary type that mrl does not build, a part that is not there or not known, or two spellings that
            disagree.
    """
    _rotates_everything(config)
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            found[key] = _read(config, key, defaults, types)
    if not found:
        return real(config, "rope_theta", defaults), None
    (first, settings), *others = found.items()
    for other, different in others:
        if different != settings:
            raise UserError(
                f"config.json: {first} ({shown(config[first])}) and {other} ({shown(config[other])}) disagree with "
                f"rope_theta={shown(config.get('rope_theta'))}: versions of transformers would read different models. "
                "Keep the one that is meant."
            )
    return settings


def write_rope(arch: ArchSpec) -> dict[str, Any]:
    """Both spellings of a model's rotary settings."""
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
            f"config.json: rope_type is {shown(kind)} in {key}; mrl builds {' and '.join(map(repr, types))}."
        )
    unknown = [part for part in rope if part not in (*_PARTS[kind], "rope_type", "type") and rope[part] is not None]
    if unknown:
        raise UserError(
            f"config.json: {key} has {shown(unknown[0])}, which is no part of the rope_type '{kind}' "
            f"({', '.join(_PARTS[kind])}). Remove it, or use a model with another rope_type."
        )
    _rotates_everything(rope)
    theta = _theta(config, key, rope, defaults)
    return theta, None if kind == "default" else _llama3(config, key, rope)


def _rotates_everything(place: Mapping[str, Any]) -> None:
    if place.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor is not 1; mrl rotates the whole head dimension.")


def _theta(config: Mapping[str, Any], key: str, rope: Mapping[str, Any], defaults: Mapping[str, Any]) -> float:
    inside = real(rope, "rope_theta", {}) if "rope_theta" in rope else None
    beside = real(config, "rope_theta", {}) if "rope_theta" in config else None
    if inside is not None and beside is not None and inside != beside:
        raise UserError(
            f"config.json: rope_theta is {beside}, and {inside} in {key}: versions of transformers would read "
            "different models. Keep the one that is meant."
        )
    if inside is not None:
        return inside
    return real(defaults, "rope_theta", {}) if beside is None else beside


def _llama3(config: Mapping[str, Any], key: str, rope: Mapping[str, Any]) -> RopeScaling:
    longest = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    outside = config.get("original_max_position_embeddings")
    if outside is not None and outside != rope.get("original_max_position_embeddings"):
        raise UserError(
            f"config.json: original_max_position_embeddings is {shown(outside)}, and "
            f"{shown(rope.get('original_max_position_embeddings'))} in {key}. Keep the one in {key}."
        )
    return RopeScaling(
        factor=real(rope, "factor", {}),
        low_freq_factor=real(rope, "low_freq_factor", {}),
        high_freq_factor=real(rope, "high_freq_factor", {}),
        original_max_position_embeddings=whole(rope, "original_max_position_embeddings", longest),
    )
