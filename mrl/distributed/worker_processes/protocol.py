"""Message formats between a worker process and its parent.

The parent sends pickles of its own objects. The worker answers with lines of JSON, each with the worker's key, because
foreign code may write into any file descriptor of its process: the parent unpickles nothing. Imports no torch.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, BinaryIO

MAX_LINE_BYTES = 1 << 20
"""Size limit of an answer, bytes; a longer line is malformed."""

MAX_ERROR_CHARS = 2000
"""Length at which error messages are cut, characters."""

_LENGTH_BYTES = 8


def command(value: object) -> bytes:
    """Returns a message to the worker: its length in 8 bytes, then a pickle."""
    body = pickle.dumps(value)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_command(stream: BinaryIO) -> Any:
    """Reads the next message from the parent.

    Raises:
        EOFError: The parent closed its end.
    """
    head = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if not body:
        raise EOFError
    return pickle.loads(body)  # trusted: only the process that started this one writes here


def line(key: int, fields: dict[str, Any]) -> bytes:
    """Returns a worker's message as one line of JSON."""
    return json.dumps({"key": key, **fields}).encode() + b"\n"


def ended_line(key: int, how: str, limit: str) -> bytes:
    """Returns the supervisor's line about a worker that ended.

    The leading newline completes a line that the worker had partly written.

    Args:
        key: Key of the worker.
        how: Exit status, signal, or the exceeded limit in words.
        limit: Name of the exceeded limit ("memory", "processes"); "" if none was.
    """
    return b"\n" + line(key, {"ended": how, "limit": limit})


def raised(error: BaseException) -> str:
    """Returns the class and message of an exception from foreign code; the class alone if `str` of it raises."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except BaseException:  # noqa: BLE001 - the message is foreign code too
        return f"{type(error).__name__}, whose message cannot be read"


def read(text: bytes, key: int) -> dict[str, Any] | None:
    """Returns the fields of a line; None unless this module wrote it in the worker with this key."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("key")) is not int or found.pop("key") != key:
        return None
    return found
