"""Execution of commands on the environments of several episodes, in a worker or in the trainer's process.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.environments._messages import TooLargeError, encode
from mrl.environments.base import Environment


def answer(
    episodes: dict[int, Environment],
    make: Callable[[], Environment],
    word: str,
    ticket: int,
    *args: Any,
    raises: tuple[type[BaseException], ...] = (),
) -> dict[str, Any]:
    """Executes a command; an exception or an invalid observation becomes a failure, which ends the episode.

    Args:
        episodes: Open environments by ticket; modified.
        make: Makes an environment.
        word: "open", "step" or "close".
        ticket: Number of the episode.
        args: Arguments of `reset` or `step`.
        raises: Exceptions that are raised and not turned into a failure.

    Returns:
        {"observation": fields}, {"failure": kind, "message": text} or {"closed": True}.
    """
    try:
        if word == "close":
            if ticket in episodes:
                episodes.pop(ticket).close()
            return {"closed": True}
        if word == "open":
            episodes[ticket] = make()
        environment = episodes[ticket]
        returned = environment.reset(*args) if word == "open" else environment.step(*args)
    except MemoryError:
        return _failure("memory", "MemoryError")
    except raises:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything, KeyboardInterrupt too
        episodes.pop(ticket, None)
        return _failure("error", protocol.raised(error))
    try:
        return {"observation": encode(returned)}
    except MemoryError:
        return _failure("memory", "MemoryError")
    except BaseException as error:  # noqa: BLE001 - methods of the returned object may raise anything
        episodes.pop(ticket, None)
        return _failure(*_unreadable(error))


def _unreadable(error: BaseException) -> tuple[str, str]:
    """Returns the cause and message of an answer that cannot be sent."""
    if isinstance(error, TooLargeError):
        return "too_large", f"it returned {error}"
    if isinstance(error, RecursionError):
        return "malformed", "it returned an Observation that is nested too deep"
    return "malformed", f"it returned {protocol.raised(error).removeprefix('ValueError: ').removeprefix('TypeError: ')}"


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"failure": kind, "message": message[: protocol.MAX_ERROR_CHARS]}
