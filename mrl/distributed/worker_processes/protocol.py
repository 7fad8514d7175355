"""What a worker and its parent tell each other: what goes to the worker, and what is believed of what comes back.

The parent sends pickles, of its own objects, to the process that it started. Back come lines of JSON, each with the
worker's key, because foreign code may write into any file descriptor of its process. Imports no torch.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, BinaryIO

MAX_LINE_BYTES = 1 << 20
"""An answer that is longer is none."""

MAX_ERROR_CHARS = 2000
"""The rest of a longer message is cut off."""

_LENGTH_BYTES = 8


def command(value: object) -> bytes:
    """A message to the worker."""
    body = pickle.dumps(value)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_command(stream: BinaryIO) -> Any:
    """The next message from the parent.

    Raises:
        EOFError: The parent closed its end.
    """
    head = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if not body:
        raise EOFError
    return pickle.loads(body)  # of the process that started this one


def line(key: int, fields: dict[str, Any]) -> bytes:
    """What a worker says."""
    return json.dumps({"key": key, **fields}).encode() + b"\n"


def ready(key: int, refusal: str, **fields: Any) -> bytes:
    """The worker's first line; `refusal` is empty where it is ready."""
    return line(key, {"refusal": refusal, **fields})


def last_words(key: int, how: str, limit: str) -> bytes:
    """The keeper's line, once the worker is gone, with the limit that it was over; ends what the worker had begun."""
    return b"\n" + line(key, {"ended": how, "limit": limit})


def raised(error: BaseException) -> str:
    """Returns the class and message of what foreign code raised; the class alone where the message cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except BaseException:  # noqa: BLE001 - the message is foreign code too
        return f"{type(error).__name__}, whose message cannot be read"


def read(text: bytes, key: int) -> dict[str, Any] | None:
    """What a line says, or None where it was not written by this module in the worker with this key."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("key")) is not int or found.pop("key") != key:
        return None
    return found
