"""The worker process: scores samples that its parent sends, one after the other.

Started by `processes/channel.py` as a fresh interpreter, which keeps (`processes/keeper.py`) the process that works.
It imports no torch and nothing of the parent's main module.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from mrl.errors import UserError
from mrl.processes import wire
from mrl.processes.keeper import Bounds, keep
from mrl.rewards import _wire
from mrl.rewards._call import Outcome, RewardCall
from mrl.rewards._signatures import Sample


def run() -> None:
    """Takes the bounds from the command line and works until the parent closes the pipe."""
    keep(Bounds.read(sys.argv[1:]), _work)


def _work(bounds: Bounds) -> None:
    """In: a list of (name, kwargs), then lists of samples. Out: see `_wire.ready` and `_wire.answer`."""
    own = os.getpid()
    stream = open(bounds.commands, "rb", closefd=False)  # noqa: SIM115 -- to the end of the process
    try:
        calls = [_load(name, kwargs) for name, kwargs in wire.read_command(stream)]
        _write(bounds, _wire.ready(bounds.key, [call.source for call in calls]))
        for serial, sample in enumerate(_samples(stream)):
            outcomes = [_call(call, sample, bounds) for call in calls]
            if os.getpid() != own:
                return  # a process that a function forked, and that came back with it
            _write(bounds, _wire.answer(bounds.key, serial, outcomes))
    except UserError as error:
        _write(bounds, wire.ready(bounds.key, str(error)))
    except (EOFError, ConnectionError):
        pass


def _samples(stream: BinaryIO) -> Iterator[Sample]:
    while True:
        yield from wire.read_command(stream)


def _call(call: RewardCall, sample: Sample, bounds: Bounds) -> Outcome:
    """Its outcome; a process that ran out of memory may hold what it had, so it is not used again."""
    try:
        return call(sample)
    except MemoryError:
        limit = f": it may take reward.memory_limit_mb={bounds.memory_limit_mb}" if bounds.memory_limit_mb else ""
        return Outcome(math.nan, f"MemoryError{limit}", lost=True)


def _write(bounds: Bounds, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(bounds.answers, view) :]


def _load(name: str, kwargs: dict[str, Any]) -> RewardCall:
    try:
        return RewardCall(name, kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward.functions: '{name}' does not import: {type(error).__name__}: {error}.") from error
