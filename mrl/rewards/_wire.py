"""What a worker and the trainer tell each other: what goes to the worker, and what is believed of what comes back.

The trainer sends pickles, of its own objects, to the process that it started. Back come lines of JSON, each with the
worker's key and the number of its sample, and checked, because a reward function may write into any file descriptor of
its process.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

from mrl.rewards._call import Outcome

MAX_LINE_BYTES = 1 << 20
"""An answer that is longer is none."""

_MAX_ERROR_CHARS = 2000  # of what a function raised
_LENGTH_BYTES = 8


def command(value: object) -> bytes:
    """A message to the worker."""
    body = pickle.dumps(value)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_command(stream: BinaryIO) -> Any:
    """The next message from the trainer.

    Raises:
        EOFError: The trainer closed its end.
    """
    head = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big"))
    if not body:
        raise EOFError
    return pickle.loads(body)  # of the process that started this one


@dataclass(frozen=True)
class Answer:
    """A line from the worker or its keeper.

    Attributes:
        refusal: Why it cannot start, "" where it is ready; None where the line says something else.
        serial: Which of the samples that this worker was sent, counted from 0.
        outcomes: Of that sample, one for each function.
        ended: How the worker ended; "" where the line says something else.
    """

    refusal: str | None = None
    serial: int = -1
    outcomes: tuple[Outcome, ...] = ()
    ended: str = ""


def ready(key: int, refusal: str) -> bytes:
    """The worker's first line; `refusal` is empty where it is ready."""
    return _line(key, {"refusal": refusal})


def answer(key: int, serial: int, outcomes: Sequence[Outcome]) -> bytes:
    """A sample's outcomes."""
    short = [replace(outcome, error=outcome.error[:_MAX_ERROR_CHARS]) for outcome in outcomes]
    return _line(key, {"serial": serial, "outcomes": [asdict(outcome) for outcome in short]})


def last_words(key: int, how: str) -> bytes:
    """The keeper's line, once the worker is gone; ends whatever the worker had begun to write."""
    return b"\n" + _line(key, {"ended": how})


def read(line: bytes, key: int, num_calls: int) -> Answer | None:
    """What a line says, or None where it was not written by this module in the worker with this key."""
    try:
        match json.loads(line):
            case {"key": found} if found != key:
                return None
            case {"key": _, "refusal": str(refusal)}:
                return Answer(refusal=refusal)
            case {"key": _, "ended": str(ended)}:
                return Answer(ended=ended)
            case {"key": _, "serial": int(serial), "outcomes": [*outcomes]} if len(outcomes) == num_calls:
                return Answer(serial=serial, outcomes=tuple(map(_outcome, outcomes)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return None


def _outcome(fields: dict[str, Any]) -> Outcome:
    """The outcome with these fields; ValueError, TypeError or KeyError where it cannot be one."""
    if type(fields["error"]) is not str or type(fields["lost"]) is not bool:
        raise TypeError(f"an outcome with {fields}")
    if not (math.isfinite(fields["value"]) or fields["error"]):
        raise ValueError(f"an outcome with {fields}")
    if not all(isinstance(said, str) or math.isfinite(said) for said in dict(fields["facts"]).values()):
        raise ValueError(f"an outcome with {fields}")
    return Outcome(**fields)


def _line(key: int, fields: dict[str, Any]) -> bytes:
    return json.dumps({"key": key, **fields}).encode() + b"\n"
