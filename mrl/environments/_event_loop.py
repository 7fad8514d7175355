"""Results of users' environments and tools, which may be asynchronous."""

from __future__ import annotations

import inspect
from typing import Any

from mrl.distributed.worker_processes import event_loop


def await_result(value: Any) -> Any:
    """Returns the result of an awaitable, or any other value unchanged."""
    return event_loop.run(_result(value)) if inspect.isawaitable(value) else value


async def _result(value: Any) -> Any:
    return await value
