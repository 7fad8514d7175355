"""Rotary settings of a config.json, in both spellings.

Transformers 5 writes `rope_parameters`; older versions write `rope_theta` and `rope_scaling`, which transformers 5 also
reads, in preference to `rope_parameters`. A file in which the two disagree is refused, since it describes different
models to different versions. Both are written, so that every version can load the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._values import flag, positive_float, positive_floats, positive_int
from mrl.models.base import ArchSpec, RopeScaling

_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"

ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", _PARTIAL, _ORIGINAL)
"""Keys of config.json that this file reads."""

_COMMON = ("rope_theta", _PARTIAL)
_PARTS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", _ORIGINAL, "factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}
"""Rotary types -> their settings besides `_COMMON`."""

ROPE_TYPES = tuple(_PARTS)

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_SHORT_SCALING = ("phi3",)
"""Families for which transformers 4 refuses a rope_scaling that has more than a type and the two lists."""
_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings for which transformers reads 0 like a missing value."""
_WITHOUT_EFFECT = ("finetuned",)
"""Settings that transformers does not read; those of the first yarn models."""


@dataclass(frozen=True)
class RopeRules:
    """Rotary settings that transformers implements for a family.

    Attributes:
        types: Rotary types.
        aliases: Further names of these types.
        partial: True if a part of each head may be rotated.
        without_effect: Settings that do not affect text, of models with a vision tower.
    """

    types: tuple[str, ...] = ROPE_TYPES
    aliases: Mapping[str, str] | None = None
    partial: bool = False
    without_effect: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a model, see `ArchSpec`."""

    rope_theta: float
    rope_scaling: RopeScaling | None
    partial_rotary_factor: float


def read_rope(config: Mapping[str, Any], defaults: Mapping[str, Any], rules: RopeRules, *, head_dim: int) -> Rope:
    """Reads the rotary settings of a config.json.

    Args:
        config: Parsed config.json.
        defaults: Values that transformers assumes for missing keys.
        rules: Settings that the family has.
        head_dim: Dimensions of a head.

    Raises:
        UserError: Unsupported rotary type, a missing, unknown or wrong setting, or two spellings that disagree.
    """
    found = {
        key: _read(config, key, defaults, rules, head_dim)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    if not found:
        return Rope(
            positive_float(config, "rope_theta", defaults),
            None,
            _partial(config, "config.json", {}, rules, head_dim, defaults),
        )
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
    scaling, partial = arch.rope_scaling, {}
    if arch.partial_rotary_factor != 1.0:
        partial = {_PARTIAL: arch.partial_rotary_factor}
    new: dict[str, Any] = {"rope_type": "default"} if scaling is None else settings_of(scaling)
    old = None if scaling is None else dict(new)
    top_level: dict[str, Any] = {}
    if old is not None and new["rope_type"] == "longrope":
        top_level[_ORIGINAL] = new[_ORIGINAL]  # where transformers 4 reads it
        if arch.family in _SHORT_SCALING:
            del old[_ORIGINAL]
            old["type"] = old.pop("rope_type")
    return {
        "rope_parameters": {**new, "rope_theta": arch.rope_theta, **partial},
        "rope_theta": arch.rope_theta,
        "rope_scaling": old,
        **partial,
        **top_level,
    }


def settings_of(scaling: RopeScaling) -> dict[str, Any]:
    """Returns the settings of a scaling as config.json has them: those that are not None, with `rope_type`."""
    values = {field.name: getattr(scaling, field.name) for field in fields(scaling) if field.name != "uses_long_factor"}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None
    }


def _read(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any], rules: RopeRules, head_dim: int) -> Rope:
    rope = config[key]
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: {key} is {shown(rope)}; expected an object with 'rope_type'.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "type" in rope and rope["type"] != kind:
        raise UserError(f"config.json: {key} has rope_type={shown(kind)} and type={shown(rope['type'])}. Keep one.")
    if isinstance(kind, str):
        kind = (rules.aliases or {}).get(kind, kind)
    if kind not in rules.types:
        raise UserError(
            f"config.json: rope_type is {shown(kind)} in {key}; mrl supports {', '.join(map(repr, rules.types))}."
        )
    known = (*_COMMON, *_PARTS[kind])
    ignored = ("rope_type", "type", *_WITHOUT_EFFECT, *rules.without_effect)
    unknown = [part for part in rope if part not in (*known, *ignored) and rope[part] is not None]
    if unknown:
        raise UserError(
            f"config.json: {key} has {shown(unknown[0])}, which rope_type '{kind}' does not have (it has "
            f"{', '.join(known)}). Remove it, or use a model with another rope_type."
        )
    partial = _partial(config, key, rope, rules, head_dim, defaults)
    theta = _theta(config, key, rope, defaults)
    scaling = None if kind == "default" else _scaling(config, key, rope, kind, defaults)
    if scaling is not None:
        _check_scaling(scaling, key, theta, int(head_dim * partial) // 2)
    return Rope(theta, scaling, partial)


def _partial(
    config: Mapping[str, Any],
    key: str,
    rope: Mapping[str, Any],
    rules: RopeRules,
    head_dim: int,
    defaults: Mapping[str, Any],
) -> float:
    """Returns the fraction of a head that is rotated, from the settings or from config.json itself."""
    given = [part[_PARTIAL] for part in (rope, config) if part.get(_PARTIAL) is not None]
    if not given:
        given = [defaults.get(_PARTIAL, 1.0)]
    factor = positive_float({_PARTIAL: given[0]}, _PARTIAL, {})
    if given[-1] != given[0]:
        raise UserError(
            f"config.json: {_PARTIAL} is {shown(given[-1])}, and {shown(given[0])} in {key}: different versions of "
            "transformers would read different models. Remove the wrong one."
        )
    if factor != 1.0 and not rules.partial:
        raise UserError(
            f"config.json: {_PARTIAL} is {factor}; transformers rotates the entire head in models of this family. "
            "Remove it, or use a model of another family."
        )
    rotated = int(head_dim * factor)
    if factor > 1.0 or rotated < 2 or rotated % 2:
        raise UserError(
            f"config.json: {_PARTIAL} is {factor}, which rotates {rotated} of the head's {head_dim} dimensions; "
            "expected an even number above 0."
        )
    return factor


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


def _scaling(
    config: Mapping[str, Any], key: str, rope: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]
) -> RopeScaling:
    values: dict[str, Any] = {}
    for part in _PARTS[kind]:
        if part == _ORIGINAL:
            values[part] = _original(config, key, rope, kind, defaults)
        elif part not in _REQUIRED[kind] and (rope.get(part) is None or (part in _OR_ZERO and rope[part] == 0)):
            continue
        elif part == "truncate":
            values[part] = flag(rope, part, {})
        elif part in ("short_factor", "long_factor"):
            values[part] = positive_floats(rope, part)
        else:
            values[part] = positive_float(rope, part, {})
    scaling = RopeScaling(kind, **values)
    if kind == "longrope":
        _check_longrope_factor(scaling, key, positive_int(config, "max_position_embeddings", defaults))
    return scaling


def _check_longrope_factor(scaling: RopeScaling, key: str, longest: int) -> None:
    """Refuses a factor that transformers 4 and 5 use differently."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if factor is None or scaling.attention_factor is not None or original is None or factor == longest / original:
        return
    raise UserError(
        f"config.json: factor is {factor} in {key}, but max_position_embeddings / {_ORIGINAL} is {longest / original}: "
        "with rope_type 'longrope' transformers 5 uses the first, and transformers 4 the second. Replace factor by "
        "attention_factor."
    )


def _original(
    config: Mapping[str, Any], key: str, rope: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]
) -> int:
    """Returns the context length before scaling; versions of transformers differ in which of two keys they prefer."""
    nested = rope.get(_ORIGINAL)
    top_level = config.get(_ORIGINAL, defaults.get(_ORIGINAL))
    if kind == "longrope" and nested is None:
        nested = top_level
    if top_level is not None and top_level != nested:
        raise UserError(
            f"config.json: {_ORIGINAL} is {shown(top_level)}, and {shown(nested)} in {key}. Keep the one in {key}, or "
            "set both to the same number."
        )
    if nested is not None:
        return positive_int({_ORIGINAL: nested}, _ORIGINAL, {})
    return positive_int(config, "max_position_embeddings", defaults)


def _check_scaling(scaling: RopeScaling, key: str, theta: float, half: int) -> None:
    """Refuses numbers for which transformers' formulas have no value; `half` is the number of frequencies."""
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != half:
            raise UserError(
                f"config.json: {name} in {key} has {len(factors)} numbers; expected {half}, half of the "
                "dimensions that are rotated."
            )
    if scaling.rope_type == "longrope" and scaling.original_max_position_embeddings == 1:
        raise UserError(f"config.json: {_ORIGINAL} is 1 in {key}; rope_type 'longrope' needs at least 2.")
    if scaling.rope_type == "yarn" and theta <= 1:
        raise UserError(f"config.json: rope_theta is {theta}; rope_type 'yarn' needs a number above 1.")
    fast, slow = scaling.beta_fast or 32, scaling.beta_slow or 1
    if scaling.rope_type == "yarn" and fast < slow:
        raise UserError(f"config.json: beta_fast={fast} in {key} is below beta_slow={slow}. Exchange them.")
