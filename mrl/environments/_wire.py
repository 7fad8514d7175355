"""The answers of an environment's worker, and how they are checked.

`distributed/worker_processes/protocol.py` owns the format of the messages.
"""

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
"""Who may speak in an observation; what the assistant said is what the model sampled."""

_KEYS = {"role", "content", "name"}
_ROOM_BYTES = 1024  # of a line, for what is around the answer


class TooLargeError(ValueError):
    """An answer that is none because nobody could read it all."""


def observed(observation: object) -> dict[str, Any]:
    """The fields of an answer.

    Raises:
        TooLargeError: It is too large to be sent.
        ValueError: It is none; the message says what came.
        TypeError: It is something else.
    """
    if not isinstance(observation, Observation):
        raise TypeError(f"a {type(observation).__name__}, expected an Observation")
    long = sum(len(text) for text in _texts(observation))
    if long > protocol.MAX_LINE_BYTES:
        raise TooLargeError(f"{long} characters; an observation may have {protocol.MAX_LINE_BYTES} bytes")
    fields = asdict(observation)
    fields["messages"] = list(fields["messages"])
    if fields["reward"] is not None and not isinstance(fields["reward"], (str, bytes)):
        fields["reward"] = float(fields["reward"])
    try:
        text = json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an Observation that is no JSON: {error}") from error
    believed(json.loads(text))
    if len(text) + _ROOM_BYTES > protocol.MAX_LINE_BYTES:
        raise TooLargeError(f"{len(text)} bytes as JSON; an observation may have {protocol.MAX_LINE_BYTES}")
    return fields


def _texts(observation: Observation) -> list[str]:
    """What it says, as far as that is text."""
    parts: list[object] = [*observation.messages, observation.info]
    return [value for part in parts if isinstance(part, dict) for value in part.values() if isinstance(value, str)]


def believed(fields: Mapping[str, Any]) -> Observation:
    """The observation with these fields.

    Raises:
        ValueError: They are none; the message says what is wrong.
    """
    try:
        messages, reward, info = fields["messages"], fields["reward"], fields["info"]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError(
                f"messages that are none: {str(messages)[:200]}; each has a 'role' of {', '.join(ROLES)}, a text as "
                "'content', and perhaps a 'name'"
            )
        if reward is not None and not (type(reward) in (int, float) and math.isfinite(reward)):
            raise ValueError(f"the reward {str(reward)[:100]}, expected a finite number or None")
        if not (type(fields["terminated"]) is bool and type(fields["truncated"]) is bool):
            raise ValueError("a 'terminated' or 'truncated' that is neither True nor False")
        if not isinstance(info, dict) or not all(map(_is_fact, info.values())):
            raise ValueError(f"the info {str(info)[:200]}, expected texts and finite numbers by name")
        return Observation(tuple(messages), reward, fields["terminated"], fields["truncated"], info)
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"an answer without its fields: {type(error).__name__}: {error}") from error


def digest(observation: Observation) -> str:
    """Tells two observations apart."""
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
