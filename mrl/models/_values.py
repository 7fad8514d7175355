"""Typed and range-checked access to single values of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.config.did_you_mean import nearest
from mrl.errors import UserError, shown

LARGEST = 1 << 24
"""Upper limit of any size in a model; keeps products of sizes small enough to allocate or to refuse."""


NEAR = 0.85
"""Similarity above which a key is suggested as a misspelled one; many valid keys of a config.json are half alike."""


def value_of(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Any:
    """Returns the value in config.json, else the default.

    Raises:
        UserError: The key is in neither.
    """
    if key in config:
        return config[key]
    if key in defaults:
        return defaults[key]
    similar = [each for each in config if abs(len(each) - len(key)) <= 2]
    near = nearest(key, similar, NEAR)
    hint = f" The file has '{near}'; rename it if that is meant." if near else ""
    raise UserError(f"config.json: '{key}' is missing.{hint}")


def positive_int(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any], *, most: int = LARGEST) -> int:
    """Returns an integer of config.json from 1 to `most`, or its default.

    Args:
        config: Content of config.json.
        key: Key of the value.
        defaults: Values of missing keys.
        most: Largest accepted value.

    Raises:
        UserError: The value is missing, of another type or out of range.
    """
    value = value_of(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {shown(value)}; expected an integer above 0.")
    if value > most:
        raise UserError(f"config.json: {key} is {shown(value)}; expected at most {most}.")
    return value


def positive_float(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> float:
    """Returns a finite number above 0 of config.json, or its default.

    Args:
        config: Content of config.json.
        key: Key of the value.
        defaults: Values of missing keys.

    Raises:
        UserError: The value is missing, of another type or out of range.
    """
    value = value_of(config, key, defaults)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"config.json: {key} is {shown(value)}; expected a number above 0.")
    try:
        return float(value)
    except OverflowError as error:
        raise UserError(f"config.json: {key} is {shown(value)}; expected a number below 1e308.") from error


def flag(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> bool:
    """Returns a boolean of config.json, or its default.

    Args:
        config: Content of config.json.
        key: Key of the value.
        defaults: Values of missing keys.

    Raises:
        UserError: The value is missing or not a boolean.
    """
    value = value_of(config, key, defaults)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {shown(value)}; expected true or false.")
    return value


def positive_floats(config: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Returns a list of finite numbers above 0 of config.json.

    Args:
        config: Content of config.json.
        key: Key of the value.

    Raises:
        UserError: The value is missing, of another type, or a number is out of range.
    """
    value = value_of(config, key, {})
    if not isinstance(value, list):
        raise UserError(f"config.json: {key} is {shown(value)}; expected a list of numbers above 0.")
    return tuple(positive_float({key: each}, key, {}) for each in value)
