"""The answers of a reward worker, and how they are checked.

`distributed/worker_processes/protocol.py` owns the format of the messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.rewards._call import Outcome, Way


@dataclass(frozen=True)
class Answer:
    """What a worker or its keeper said; all empty where neither can have said it.

    Attributes:
        refusal: Why it cannot start, "" where it is ready; None where the line says something else.
        serial: Which of the tasks that this worker was sent, counted from 0.
        place: Which of the task's samples.
        outcomes: Of that sample, one for each of the task's functions.
        ended: How the worker ended; "" where the line says something else.
        sources: Of a ready worker: the digest of the source of each function.
        ways: Of a ready worker: how each function is called.
    """

    refusal: str | None = None
    serial: int = -1
    place: int = -1
    outcomes: tuple[Outcome, ...] = ()
    ended: str = ""
    sources: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()


def ready(key: int, sources: Sequence[str], ways: Sequence[Way]) -> bytes:
    """The worker's first line, once it has imported the functions."""
    return protocol.line(key, {"refusal": "", "sources": list(sources), "ways": [asdict(way) for way in ways]})


def answer(key: int, serial: int, place: int, outcomes: Sequence[Outcome]) -> bytes:
    """A sample's outcomes."""
    values = [_shortened(outcome).as_json for outcome in outcomes]
    return protocol.line(key, {"serial": serial, "place": place, "outcomes": values})


def read(said: Mapping[str, Any], num_calls: int) -> Answer:
    """What a line says."""
    try:
        if "outcomes" in said:
            return _scored(said["serial"], said["place"], said["outcomes"], num_calls)
        match said:
            case {"refusal": "", "sources": [*sources], "ways": [*ways]} if len(sources) == len(ways) == num_calls:
                return Answer(refusal="", sources=tuple(map(str, sources)), ways=tuple(Way(**way) for way in ways))
            case {"refusal": str(refusal)} if refusal:
                return Answer(refusal=refusal)
            case {"ended": str(ended)}:
                return Answer(ended=ended)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return Answer()


def _scored(serial: Any, place: Any, outcomes: Any, num_calls: int) -> Answer:
    is_one = isinstance(serial, int) and isinstance(place, int) and isinstance(outcomes, list)
    if not is_one or len(outcomes) > num_calls:
        return Answer()
    return Answer(serial=serial, place=place, outcomes=tuple(map(_outcome, outcomes)))


def _shortened(outcome: Outcome) -> Outcome:
    short = len(outcome.error) <= protocol.MAX_ERROR_CHARS
    return outcome if short else replace(outcome, error=outcome.error[: protocol.MAX_ERROR_CHARS])


def _outcome(fields: Any) -> Outcome:
    """The outcome that was told so; ValueError, TypeError or KeyError where it cannot be one."""
    if type(fields) is float and math.isfinite(fields):
        return Outcome(fields)
    if type(fields["error"]) is not str or type(fields["lost"]) is not bool:
        raise TypeError(f"an outcome with {fields}")
    if not (math.isfinite(fields["value"]) or fields["error"]):
        raise ValueError(f"an outcome with {fields}")
    if not all(isinstance(said, str) or math.isfinite(said) for said in dict(fields["facts"]).values()):
        raise ValueError(f"an outcome with {fields}")
    return Outcome(**fields)
