"""Worker process that calls reward functions.

Started by `distributed/worker_processes/worker_process.py` as a fresh interpreter, under its
`distributed/worker_processes/supervisor.py`. Imports no torch and nothing of the parent's main module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mrl.distributed.worker_processes import event_loop, protocol
from mrl.distributed.worker_processes.worker_main import ParentPipe, run_worker
from mrl.errors import UserError
from mrl.rewards import _messages
from mrl.rewards._bound_reward import Outcome, RewardCall
from mrl.rewards._signatures import Sample


def run() -> None:
    """Runs the worker with the supervisor's arguments from the command line."""
    run_worker(_work)


def _work(pipe: ParentPipe) -> None:
    """Receives a list of (name, kwargs), then lists of (indices of functions, samples of each call).

    Sends {"sources", "styles"} when ready, then the message of `_wire.encode` for each sample.
    """
    known = [_load(name, kwargs) for name, kwargs in pipe.receive()]
    pipe.send(refusal="", sources=[call.source for call in known], styles=[asdict(call.style) for call in known])
    for serial, (indices, units) in enumerate(_tasks(pipe)):
        calls = [known[index] for index in indices]
        if all(call.style.is_async for call in calls):
            event_loop.run(_score_concurrently(pipe, serial, calls, units))
            continue
        for unit in units:
            _send(pipe, serial, 0, [_call(call, unit, pipe.memory_limit_mb) for call in calls])


def _tasks(pipe: ParentPipe) -> Iterator[tuple[Sequence[int], Sequence[Sequence[Sample]]]]:
    while True:
        yield from pipe.receive()


def _send(pipe: ParentPipe, serial: int, first: int, by_call: Sequence[Sequence[Outcome]]) -> None:
    """Sends the outcomes of a call's samples; `first` is the index of its first sample in the task."""
    for place, outcomes in enumerate(zip(*by_call, strict=True), first):
        pipe.send(**_messages.encode(serial, place, outcomes))


async def _score_concurrently(
    pipe: ParentPipe, serial: int, calls: Sequence[RewardCall], units: Sequence[Sequence[Sample]]
) -> None:
    from asyncio import gather

    async def score(unit: Sequence[Sample], first: int) -> None:
        _send(pipe, serial, first, await gather(*(_call_async(call, unit, pipe.memory_limit_mb) for call in calls)))

    starts = itertools.accumulate(map(len, units), initial=0)
    await gather(*(score(unit, first) for unit, first in zip(units, starts, strict=False)))


def _call(call: RewardCall, unit: Sequence[Sample], memory_limit_mb: int) -> list[Outcome]:
    try:
        return call(unit, event_loop.run)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, KeyboardInterrupt too
        return _failed(error, unit, memory_limit_mb)


async def _call_async(call: RewardCall, unit: Sequence[Sample], memory_limit_mb: int) -> list[Outcome]:
    try:
        return await call.call_async(unit)
    except BaseException as error:  # noqa: BLE001 - see `_call`
        return _failed(error, unit, memory_limit_mb)


def _failed(error: BaseException, unit: Sequence[Sample], memory_limit_mb: int) -> list[Outcome]:
    """Returns an outcome for each sample of a call that raised; out of memory, the worker is to be replaced."""
    if isinstance(error, MemoryError):
        limit = f": it may take reward.memory_limit_mb={memory_limit_mb}" if memory_limit_mb else ""
        return [Outcome(math.nan, f"MemoryError{limit}", lost=True)] * len(unit)
    return [Outcome(math.nan, protocol.raised(error))] * len(unit)


def _load(name: str, kwargs: dict[str, Any]) -> RewardCall:
    try:
        return RewardCall(name, kwargs)
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"reward.functions: '{name}' does not import: {protocol.raised(error)}.") from error
