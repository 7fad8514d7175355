"""Reward functions that a script passed as Python objects: they are called in this process, without limits.

A function without a path cannot be imported by a worker process. Time and memory limits and the score cache do not
apply to it; exceptions and unusable return values fail only their samples, as in workers. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from mrl.config.config import RewardFunctionConfig
from mrl.distributed.worker_processes import event_loop
from mrl.rewards._bound_reward import Outcome, RewardCall
from mrl.rewards._call_batches import Order, Unit, group_calls
from mrl.rewards._signatures import Sample


class ObjectCalls:
    """Calls of the functions of a config that are Python objects."""

    def __init__(self, functions: Mapping[int, RewardFunctionConfig]) -> None:
        """Checks the functions.

        Args:
            functions: Functions by their index in `reward.functions`.

        Raises:
            UserError: A function cannot be called with its kwargs, or has an impossible `batch`.
        """
        self._indices = list(functions)
        self._calls = [RewardCall(one.name, one.kwargs) for one in functions.values()]
        self._batches = group_calls(
            [one.name for one in functions.values()],
            [call.style for call in self._calls],
            [one.batch for one in functions.values()],
        )

    def score(
        self, samples: Sequence[Sample], order: Order, allowed: int, abort_requested: Callable[[], bool]
    ) -> dict[tuple[int, ...], dict[int, list[Outcome]]]:
        """Scores samples, until more than `allowed` of them failed or a stop is requested.

        Returns:
            (indices of functions) -> row -> an outcome of each function; rows that were not scored are missing.
        """
        found: dict[tuple[int, ...], dict[int, list[Outcome]]] = {}
        failed: set[int] = set()
        for batch in self._batches:
            calls = [self._calls[place] for place in batch.calls]
            by_row = found[tuple(self._indices[place] for place in batch.calls)] = {}
            for task in batch.tasks(batch.units(order), 1):
                if len(failed) > allowed or abort_requested():
                    break
                by_row |= _score(calls, task.units, samples, is_async=batch.is_async)
                failed |= {row for row in task.rows if any(outcome.error for outcome in by_row[row])}
        return found


def _score(
    calls: Sequence[RewardCall], units: Sequence[Unit], samples: Sequence[Sample], *, is_async: bool
) -> dict[int, list[Outcome]]:
    """Returns an outcome of each function for each row of these units."""
    inputs = [[samples[row] for row in unit] for unit in units]
    if is_async:
        results = event_loop.run(_call_concurrently(calls, inputs))
    else:
        results = [[call(unit, event_loop.run) for call in calls] for unit in inputs]
    return {
        row: list(outcomes)
        for unit, by_call in zip(units, results, strict=True)
        for row, outcomes in zip(unit, zip(*by_call, strict=True), strict=True)
    }


async def _call_concurrently(
    calls: Sequence[RewardCall], inputs: Sequence[Sequence[Sample]]
) -> list[list[list[Outcome]]]:
    """Returns the outcomes by unit, function and sample."""

    async def call_all(unit: Sequence[Sample]) -> list[list[Outcome]]:
        return list(await asyncio.gather(*(call.call_async(unit) for call in calls)))

    return list(await asyncio.gather(*map(call_all, inputs)))
