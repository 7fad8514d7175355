"""Worker process that runs the environments of several episodes, one command at a time.

Started by `distributed/worker_processes/worker_process.py` as a fresh interpreter, under its
`distributed/worker_processes/supervisor.py`. Imports no torch and nothing of the parent's main module.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.distributed.worker_processes.folders import temporary_folder
from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine
from mrl.distributed.worker_processes.worker_main import ParentPipe, run_worker
from mrl.environments._factory import find_environment
from mrl.environments._messages import TooLargeError, encode
from mrl.environments._schemas import schema_of
from mrl.environments.base import Environment, Schema
from mrl.errors import UserError


def run() -> None:
    """Runs the worker with the supervisor's arguments from the command line.

    The worker has its own folder for temporary files, which the supervisor removes when it ends.
    """
    with temporary_folder("environment") as folder:
        run_worker(partial(_work, folder))


def _work(folder: str, pipe: ParentPipe) -> None:
    """Receives (name, kwargs, confinement), then commands (word, ticket, ...).

    Sends {"tools", "missing"} when ready, then an answer to each command.
    """
    name, kwargs, confinement = pipe.receive()
    tempfile.tempdir = folder
    missing = confine(replace(confinement, network=True, writable=(folder, *confinement.writable), calls="worker"))
    make, schemas, more = _load(name, kwargs, confinement)
    pipe.send(refusal="", tools=schemas, missing=[*missing, *more])
    episodes: dict[int, Environment] = {}
    for serial in itertools.count():
        pipe.send(serial=serial, **_answer(episodes, make, *pipe.receive()))


def _load(
    name: str, kwargs: dict[str, Any], confinement: Confinement
) -> tuple[Callable[[], Environment], list[Schema], list[str]]:
    """Imports the environment and disables the network unless it needs the network.

    Returns:
        A constructor of environments, the schemas of their tools, and the reasons why the network is not disabled.

    Raises:
        UserError: The import or the construction failed.
    """
    try:
        make, network = find_environment(name, kwargs)
        missing = [] if network or confinement.network else confine(Confinement(network=False))
        schemas = [schema_of(tool) for tool in make().tools]
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"environment '{name}' cannot be made: {protocol.raised(error)}.") from error
    return make, schemas, missing


def _answer(
    episodes: dict[int, Environment], make: Callable[[], Environment], word: str, ticket: int, *args: Any
) -> dict[str, Any]:
    """Executes a command; an exception or an invalid observation becomes a failure, which ends the episode."""
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
