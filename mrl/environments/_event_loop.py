"""Event loop for users' asynchronous environments and tools; one per worker, for its lifetime."""

from __future__ import annotations

import asyncio
import inspect
from functools import cache
from typing import Any


def await_result(value: Any) -> Any:
    """Returns the result of an awaitable, or any other value unchanged."""
    return _loop().run_until_complete(_result(value)) if inspect.isawaitable(value) else value


async def _result(value: Any) -> Any:
    return await value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
