"""JSON form of observations in the messages of environment workers, and its validation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.environments.base import Observation

ROLES = ("user", "tool", "system")
"""Roles of messages in an observation; assistant messages come from the model only."""

_KEYS = {"role", "content", "name"}
_ROOM_BYTES = 1024  # of a line, for the other fields of the message


class TooLargeError(ValueError):
    """Observation that exceeds the size limit of a message."""


def encode(observation: object) -> dict[str, Any]:
    """Validates an environment's return value and returns its fields.

    Raises:
        TooLargeError: The observation exceeds the size limit.
        ValueError: A field is invalid or not JSON.
        TypeError: The value is not an Observation.
    """
    if not isinstance(observation, Observation):
        raise TypeError(f"a {type(observation).__name__}, expected an Observation")
    num_chars = sum(len(text) for text in _texts(observation))
    if num_chars > protocol.MAX_LINE_BYTES:
        raise TooLargeError(f"{num_chars} characters; an observation may have {protocol.MAX_LINE_BYTES} bytes")
    fields = asdict(observation)
    fields["messages"] = list(fields["messages"])
    if fields["reward"] is not None and not isinstance(fields["reward"], (str, bytes)):
        fields["reward"] = float(fields["reward"])
    try:
        text = json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an Observation that is not JSON: {error}") from error
    decode(json.loads(text))
    if len(text) + _ROOM_BYTES > protocol.MAX_LINE_BYTES:
        raise TooLargeError(f"{len(text)} bytes as JSON; an observation may have {protocol.MAX_LINE_BYTES}")
    return fields


def _texts(observation: Observation) -> list[str]:
    """Returns the texts in an observation's messages and info."""
    parts: list[object] = [*observation.messages, observation.info]
    return [value for part in parts if isinstance(part, dict) for value in part.values() if isinstance(value, str)]


def decode(fields: Mapping[str, Any]) -> Observation:
    """Validates the fields of an observation and returns it.

    Raises:
        ValueError: A field is missing or invalid.
    """
    try:
        messages, reward, info = fields["messages"], fields["reward"], fields["info"]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError(
                f"invalid messages: {str(messages)[:200]}; expected a 'role' of {', '.join(ROLES)}, a text as "
                "'content', and optionally a 'name'"
            )
        if reward is not None and not (type(reward) in (int, float) and math.isfinite(reward)):
            raise ValueError(f"the reward {str(reward)[:100]}, expected a finite number or None")
        if not (type(fields["terminated"]) is bool and type(fields["truncated"]) is bool):
            raise ValueError("a 'terminated' or 'truncated' that is neither True nor False")
        if not isinstance(info, dict) or not all(map(_is_fact, info.values())):
            raise ValueError(f"the info {str(info)[:200]}, expected texts and finite numbers by name")
        return Observation(tuple(messages), reward, fields["terminated"], fields["truncated"], info)
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"an invalid observation: {type(error).__name__}: {error}") from error


def digest(observation: Observation) -> str:
    """Returns a hash of an observation, to compare replays."""
    return blake2b(json.dumps(asdict(observation), sort_keys=True).encode(), digest_size=16).hexdigest()


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys() <= _KEYS
        and message["role"] in ROLES
        and all(isinstance(value, str) for value in message.values())
    )


def _is_fact(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value))
