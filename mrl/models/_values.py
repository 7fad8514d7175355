"""Single values of a config.json: whole numbers, numbers and flags, checked for their type and their range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown

LARGEST = 1 << 24
"""No size of a model comes near it; products of such numbers stay numbers that a machine can be asked about."""


def value_of(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Any:
    """What the file says, else the default.

    Raises:
        UserError: Neither is there.
    """
    if key in config:
        return config[key]
    if key in defaults:
        return defaults[key]
    raise UserError(f"config.json: '{key}' is missing.")


def whole(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any], *, most: int = LARGEST) -> int:
    """A whole number of 1 to `most` in config.json, or its default."""
    value = value_of(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {shown(value)}; expected a whole number above 0.")
    if value > most:
        raise UserError(f"config.json: {key} is {shown(value)}; expected at most {most}.")
    return value


def real(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> float:
    """A finite number above 0 of config.json, or its default."""
    value = value_of(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"config.json: {key} is {shown(value)}; expected a number above 0.")
    try:
        return float(value)
    except OverflowError as error:
        raise UserError(f"config.json: {key} is {shown(value)}; expected a number below 1e308.") from error


def flag(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> bool:
    """A flag of config.json, or its default."""
    value = value_of(config, key, defaults)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {shown(value)}; expected true or false.")
    return value
