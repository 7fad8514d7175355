"""The worker process: calls reward functions for its parent, one task after the other.

Started by `distributed/worker_processes/worker_process.py` as a fresh interpreter, which keeps
(`distributed/worker_processes/supervisor.py`) the process that works. It imports no torch and nothing of the parent's
main module.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from mrl.distributed.worker_processes import protocol
from mrl.distributed.worker_processes.supervisor import Bounds, keep
from mrl.errors import UserError
from mrl.rewards import _wire
from mrl.rewards._call import Outcome, RewardCall
from mrl.rewards._signatures import Sample

if TYPE_CHECKING:
    import asyncio


def run() -> None:
    """Takes the bounds from the command line and works until the parent closes the pipe."""
    keep(Bounds.read(sys.argv[1:]), _work)


def _work(bounds: Bounds) -> None:
    """In: a list of (name, kwargs), then lists of tasks. Out: see `_wire.ready` and `_wire.answer`."""
    own = os.getpid()
    stream = open(bounds.commands, "rb", closefd=False)  # noqa: SIM115 -- to the end of the process

    def tell(serial: int, first: int, by_call: Sequence[Sequence[Outcome]]) -> None:
        """Of a unit, whose samples begin at this place of the task."""
        if os.getpid() != own:
            raise EOFError  # a process that a function forked, and that came back with it
        for place, outcomes in enumerate(zip(*by_call, strict=True)):
            _write(bounds, _wire.answer(bounds.key, serial, first + place, outcomes))

    async def beside(calls: Sequence[RewardCall], units: Sequence[Sequence[Sample]], serial: int) -> None:
        from asyncio import gather

        starts = itertools.accumulate(map(len, units), initial=0)
        await gather(*(one(calls, unit, serial, first) for unit, first in zip(units, starts, strict=False)))

    async def one(calls: Sequence[RewardCall], unit: Sequence[Sample], serial: int, first: int) -> None:
        from asyncio import gather

        by_call = await gather(*(_later(call, unit, bounds) for call in calls))
        tell(serial, first, by_call)

    try:
        known = [_load(name, kwargs) for name, kwargs in protocol.read_command(stream)]
        _write(bounds, _wire.ready(bounds.key, [call.source for call in known], [call.way for call in known]))
        for serial, (places, units) in enumerate(_tasks(stream)):
            calls = [known[place] for place in places]
            if all(call.way.waits for call in calls):
                _run(beside(calls, units, serial))
                continue
            for unit in units:
                tell(serial, 0, [_call(call, unit, bounds) for call in calls])
    except UserError as error:
        _write(bounds, protocol.ready(bounds.key, str(error)))
    except (EOFError, ConnectionError):
        pass


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one of this process: what a function keeps from call to call belongs to it."""
    import asyncio  # half of a worker's start, and few functions wait

    return asyncio.new_event_loop()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _loop().run_until_complete(coroutine)


def _tasks(stream: BinaryIO) -> Iterator[tuple[Sequence[int], Sequence[Sequence[Sample]]]]:
    """Places of the functions to call, and the samples of each call."""
    while True:
        yield from protocol.read_command(stream)


def _call(call: RewardCall, unit: Sequence[Sample], bounds: Bounds) -> list[Outcome]:
    try:
        return call(unit, _run)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, KeyboardInterrupt too
        return _failed(error, unit, bounds)


async def _later(call: RewardCall, unit: Sequence[Sample], bounds: Bounds) -> list[Outcome]:
    try:
        return await call.later(unit)
    except BaseException as error:  # noqa: BLE001 - see `_call`
        return _failed(error, unit, bounds)


def _failed(error: BaseException, unit: Sequence[Sample], bounds: Bounds) -> list[Outcome]:
    """Returns an outcome for each sample of a call that raised."""
    if isinstance(error, MemoryError):
        return _no_memory(unit, bounds)
    return [Outcome(math.nan, protocol.raised(error))] * len(unit)


def _no_memory(unit: Sequence[Sample], bounds: Bounds) -> list[Outcome]:
    """A process that ran out of memory may hold what it had, so it is not used again."""
    limit = f": it may take reward.memory_limit_mb={bounds.memory_limit_mb}" if bounds.memory_limit_mb else ""
    return [Outcome(math.nan, f"MemoryError{limit}", lost=True)] * len(unit)


def _write(bounds: Bounds, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(bounds.answers, view) :]


def _load(name: str, kwargs: dict[str, Any]) -> RewardCall:
    try:
        return RewardCall(name, kwargs)
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"reward.functions: '{name}' does not import: {protocol.raised(error)}.") from error
