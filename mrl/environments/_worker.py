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
from mrl.environments._commands import answer
from mrl.environments._factory import find_environment
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
        pipe.send(serial=serial, **answer(episodes, make, *pipe.receive()))


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
