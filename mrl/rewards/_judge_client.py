"""Concurrent queries to judges (`judge.py`), in a thread that runs in parallel with the worker processes.

Querying stops early if too many samples failed, an endpoint is down, or a stop is requested.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

from mrl.config import registry
from mrl.errors import UserError
from mrl.rewards._arguments import check_types
from mrl.rewards._bound_reward import Outcome
from mrl.rewards._endpoint import JudgeEndpoint, NoReplyError
from mrl.rewards._signatures import Sample
from mrl.rewards.judge import Judge

_POLL_S = 0.2  # interval at which `abort_requested` is polled
DOWN_AFTER = 8
"""Consecutive failures, if not fewer than the endpoint's concurrency, after which it counts as down."""


def make_judge(name: str, kwargs: Mapping[str, Any], variables: Callable[..., Mapping[str, str]]) -> Judge:
    """Makes the judge that the config names.

    Raises:
        UserError: The judge does not accept these arguments, or its API key is missing.
    """
    try:
        judge_class = registry.find("rewards", name, "REWARD")
        for one in (*judge_class.__mro__[:-1], JudgeEndpoint):
            check_types(one.__init__, kwargs)
        judge: Judge = judge_class(**kwargs)
        judge.endpoint.prepare(variables)
        return judge
    except UserError as error:
        raise UserError(f"reward.functions: '{name}': {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"reward.functions: '{name}' cannot be called with {dict(kwargs)}: {error}.") from error


class JudgeQueries(AbstractContextManager["JudgeQueries"]):
    """A batch of judge queries in a background thread; a context manager that cancels the rest on exit.

    Attributes:
        done: Index of each finished sample -> one outcome per judge.
    """

    def __init__(
        self,
        judges: Sequence[Judge],
        samples: Mapping[int, Sample],
        give_up_after: int,
        on_done: Callable[[int, list[Outcome]], None] = lambda index, outcomes: None,
    ) -> None:
        """Starts the thread.

        Args:
            judges: One or more judges, all of which score every sample.
            samples: Samples by index.
            give_up_after: Number of failed samples above which querying stops.
            on_done: Callback for each finished sample, called in the thread.
        """
        self.done: dict[int, list[Outcome]] = {}
        self._judges, self._samples, self._give_up_after, self._on_done = judges, samples, give_up_after, on_done
        self._error: BaseException | None = None
        self._num_failed = 0
        self._in_a_row: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._query_all())
        self._thread = threading.Thread(target=self._run, name="mrl judges", daemon=True)
        self._thread.start()

    def wait(self, abort_requested: Callable[[], bool] = lambda: False) -> dict[int, list[Outcome]]:
        """Returns `done` when all samples are finished, too many failed, or a stop is requested."""
        while self._thread.is_alive() and not abort_requested():
            self._thread.join(_POLL_S)
        self.end()
        if self._error is not None:
            raise self._error
        return self.done

    def end(self) -> None:
        """Cancels the pending queries."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def __exit__(self, *exc_info: object) -> None:
        if not self._loop.is_closed():
            self.end()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`, in the caller's thread
            self._error = error
        finally:
            left = asyncio.all_tasks(self._loop)  # `gather` returns at the first exception and leaves the others
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))

    async def _query_all(self) -> None:
        async with AsyncExitStack() as stack:
            endpoints = [
                (
                    judge,
                    await stack.enter_async_context(judge.endpoint.client()),
                    asyncio.Semaphore(judge.endpoint.concurrency),
                )
                for judge in self._judges
            ]

            async def score(index: int, sample: Sample) -> None:
                outcomes = await asyncio.gather(*(self._ask(at, *each, sample) for at, each in enumerate(endpoints)))
                self.done[index] = outcomes
                self._on_done(index, outcomes)
                self._num_failed += any(outcome.error for outcome in outcomes)
                if self._num_failed > self._give_up_after:
                    self._task.cancel()

            await asyncio.gather(*(score(index, sample) for index, sample in self._samples.items()))

    async def _ask(self, index: int, judge: Judge, client: Any, slot: asyncio.Semaphore, sample: Sample) -> Outcome:
        try:
            messages = judge.messages(sample)
        except Exception as error:  # noqa: BLE001 - rows may contain anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return Outcome(math.nan, f"the judge's prompt could not be filled in: {reason}")
        async with slot:
            in_a_row = self._in_a_row.get(index, 0)
            if in_a_row >= max(DOWN_AFTER, judge.endpoint.concurrency):
                return Outcome(math.nan, f"not asked: {judge.endpoint.url} gave no score {in_a_row} times in a row")
            try:
                value, facts = await judge.endpoint.ask(client, messages, lambda reply: judge.read(reply, sample))
            except NoReplyError as error:
                self._in_a_row[index] = self._in_a_row.get(index, 0) + 1
                return Outcome(math.nan, f"the judge gave no score: {error}")
            self._in_a_row[index] = 0
            return Outcome(value, facts=facts)
