"""The worker process: holds the environments of several episodes and lets them answer, one after the other.

Started by `distributed/worker_processes/worker_process.py` as a fresh interpreter, which keeps
(`distributed/worker_processes/supervisor.py`) the process that works. It imports no torch and nothing of the parent's
main module.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.distributed.worker_processes.folders import owned_folder
from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine
from mrl.distributed.worker_processes.supervisor import Bounds, keep
from mrl.environments._factory import maker
from mrl.environments._schemas import schema_of
from mrl.environments._wire import TooLargeError, observed
from mrl.environments.base import Environment, Schema
from mrl.errors import UserError


def run() -> None:
    """Takes the bounds from the command line and works until the parent closes the pipe.

    The worker has a folder of its own for temporary files, which goes when the keeper does.
    """
    with owned_folder("environment") as folder:
        keep(Bounds.read(sys.argv[1:]), partial(_work, folder))


def _work(folder: str, bounds: Bounds) -> None:
    """In: (name, kwargs, confinement), then (word, ticket, ...). Out: `wire.ready`, then one line for each word."""
    own = os.getpid()
    stream = open(bounds.commands, "rb", closefd=False)  # noqa: SIM115 -- to the end of the process
    try:
        name, kwargs, asked = protocol.read_command(stream)
        tempfile.tempdir = folder
        missing = confine(replace(asked, network=True, writable=(folder, *asked.writable), calls="worker"))
        make, schemas, more = _loaded(name, kwargs, asked)
        _write(bounds, protocol.ready(bounds.key, "", tools=schemas, missing=[*missing, *more]))
        episodes: dict[int, Environment] = {}
        serial = 0
        while True:
            answer = _answer(episodes, make, *protocol.read_command(stream))
            if os.getpid() != own:
                return  # a process that an environment forked, and that came back with it
            _write(bounds, protocol.line(bounds.key, {"serial": serial, **answer}))
            serial += 1
    except UserError as error:
        _write(bounds, protocol.ready(bounds.key, str(error)))
    except (EOFError, ConnectionError):
        pass


def _loaded(
    name: str, kwargs: dict[str, Any], asked: Confinement
) -> tuple[Callable[[], Environment], list[Schema], list[str]]:
    """Makes environments, what the prompt is told of their tools, and what kept no sockets from being made.

    Whatever goes wrong is told as a UserError. The network is open until the imported code does not say it needs it.
    """
    try:
        make, network = maker(name, kwargs)
        missing = [] if network or asked.network else confine(Confinement(network=False))
        schemas = [schema_of(tool) for tool in make().tools]
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"environment '{name}' cannot be made: {protocol.raised(error)}.") from error
    return make, schemas, missing


def _answer(
    episodes: dict[int, Environment], make: Callable[[], Environment], word: str, ticket: int, *args: Any
) -> dict[str, Any]:
    """What an episode's environment does; whatever it does wrong is a failure, and the end of the episode."""
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
        return {"observation": observed(returned)}
    except MemoryError:
        return _failure("memory", "MemoryError")
    except BaseException as error:  # noqa: BLE001 - what it returned may have methods of its own
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


def _write(bounds: Bounds, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(bounds.answers, view) :]
