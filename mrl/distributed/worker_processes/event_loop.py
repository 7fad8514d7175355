"""Event loop for users' asynchronous rewards, environments and tools; one per process, for its lifetime.

Their functions can therefore keep objects of the loop between calls. Imports asyncio on first use, because it takes
half of a worker's start-up time and few functions are asynchronous.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end and returns its result.

    If this thread is already running an event loop, as in a notebook, another thread runs the coroutine.
    """
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop().run_until_complete(coroutine)
    return _thread().submit(_loop().run_until_complete, coroutine).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    return asyncio.new_event_loop()


@cache
def _thread() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, thread_name_prefix="event_loop")
