"""JSON form of outcomes in the messages of reward workers, and its validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.rewards._bound_reward import Outcome


@dataclass(frozen=True)
class ScoredSample:
    """Result of one sample, as a worker sends it.

    Attributes:
        serial: Number of the task, counted from the worker's start.
        place: Index of the sample in the task.
        outcomes: Outcome of each of the task's functions.
    """

    serial: int
    place: int
    outcomes: tuple[Outcome, ...]


def encode(serial: int, place: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the fields of the message about a sample."""
    return {"serial": serial, "place": place, "outcomes": [_shortened(outcome).as_json for outcome in outcomes]}


def decode(message: Mapping[str, Any], num_calls: int) -> ScoredSample | None:
    """Returns a worker's answer; None for any other or malformed message."""
    try:
        serial, place, outcomes = message["serial"], message["place"], message["outcomes"]
        is_one = isinstance(serial, int) and isinstance(place, int) and isinstance(outcomes, list)
        if not is_one or len(outcomes) > num_calls:
            return None
        return ScoredSample(serial, place, tuple(map(_outcome, outcomes)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _shortened(outcome: Outcome) -> Outcome:
    short = len(outcome.error) <= protocol.MAX_ERROR_CHARS
    return outcome if short else replace(outcome, error=outcome.error[: protocol.MAX_ERROR_CHARS])


def _outcome(fields: Any) -> Outcome:
    """Parses an outcome; raises ValueError, TypeError or KeyError if it is malformed."""
    if type(fields) is float and math.isfinite(fields):
        return Outcome(fields)
    if type(fields["error"]) is not str or type(fields["lost"]) is not bool:
        raise TypeError(f"an outcome with {fields}")
    if not (math.isfinite(fields["value"]) or fields["error"]):
        raise ValueError(f"an outcome with {fields}")
    if not all(isinstance(value, str) or math.isfinite(value) for value in dict(fields["facts"]).values()):
        raise ValueError(f"an outcome with {fields}")
    return Outcome(**fields)
