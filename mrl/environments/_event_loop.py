"""Asynchronous code of a user's own, run to its end: one event loop for a worker's whole life."""

from __future__ import annotations

import asyncio
import inspect
from functools import cache
from typing import Any


def awaited(value: Any) -> Any:
    """The value itself, or what it gives where it is awaitable."""
    return _loop().run_until_complete(_result(value)) if inspect.isawaitable(value) else value


async def _result(value: Any) -> Any:
    return await value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
