"""Who this process is in MPI's world, and what rank 0 tells the others over it.

Owns the import of mpi4py (extra `mpi`), which is needed only where mpirun started the ranks. MPI lives as long as the
job: it is ended in `end` and not at the exit of the process, where a rank that failed would wait for the others. A
program that began MPI before it called mrl ends it itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mrl.distributed.launcher_env import Environment
from mrl.errors import UserError, first_line, to_install

MPI_MODULE = "mpi4py.MPI"
"""Its import begins MPI."""

SIZE_BYTES = 8
"""Of the number that says how long a word is."""


def complete(environment: Environment) -> Environment:
    """Collective over the job: `environment` with the sizes that MPI knows.

    Raises:
        UserError: There is no mpi4py, or its MPI library is not that of the launcher.
    """
    world = _world()
    if world.Get_rank() != environment.rank:
        raise _other_library(f"the launcher started rank {environment.rank}, but mpi4py sees rank {world.Get_rank()}")
    from mpi4py.MPI import COMM_TYPE_SHARED

    host = world.Split_type(COMM_TYPE_SHARED)
    return replace(
        environment,
        world_size=world.Get_size(),
        local_rank=host.Get_rank(),
        local_world_size=host.Get_size(),
        num_nodes=world.allreduce(int(host.Get_rank() == 0)),
    )


def tell(value: Any, environment: Environment) -> Any:
    """Collective over the job: the value of rank 0, which JSON holds, on every rank.

    Raises:
        UserError: There is no mpi4py, or its MPI library is not that of the launcher.
    """
    world = _whole_world(environment)
    words = bytearray(json.dumps(value).encode() if environment.rank == 0 else b"")
    size = bytearray(len(words).to_bytes(SIZE_BYTES, "big"))
    world.Bcast(size, root=0)  # its small brother, `bcast`, unpickles what it receives
    words.extend(bytes(int.from_bytes(size, "big") - len(words)))
    world.Bcast(words, root=0)
    return json.loads(words)


def among(ranks: Sequence[int], environment: Environment) -> Any:
    """Collective over `ranks`: their communicator, in this order; other ranks of the job take no part.

    Raises:
        UserError: There is no mpi4py, or its MPI library is not that of the launcher.
    """
    world = _whole_world(environment)
    return world.Create_group(world.Get_group().Incl(list(ranks)))


def is_alone() -> bool:
    """Whether this process is a world of its own to MPI, or there is no MPI: srun without --mpi starts such ranks.

    The ranks of a job that has one rank are alone too.
    """
    try:
        return int(_world().Get_size()) == 1
    except UserError:
        return True


def check_threads() -> None:
    """Returns where several threads of this process may speak over MPI at a time.

    Raises:
        UserError: The MPI library was built without.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise _unusable("it lets one thread of a process talk at a time; here several must")


def end() -> None:
    """Collective over the job: ends MPI; nothing where it was never begun, or not by mrl."""
    if not _begun:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _whole_world(environment: Environment) -> Any:
    """MPI's world, which has all ranks that the launcher started."""
    world = _world()
    size = world.Get_size()
    if size != environment.world_size:
        raise _other_library(f"the launcher started {environment.world_size} ranks, but mpi4py sees {size}")
    return world


_begun: list[str] = []
"""MPI, where mrl began it."""


@cache
def _world() -> Any:
    ours = MPI_MODULE not in sys.modules
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library to load
        raise UserError(
            f"the ranks were started over MPI, which needs mpi4py and its MPI library ({first_line(error)}). Install "
            f"it: {to_install('mpi')}; or start by torchrun or srun, which need none."
        ) from error
    if ours:
        _begun.append(MPI_MODULE)
    return MPI.COMM_WORLD


def _unusable(why: str) -> UserError:
    from mpi4py import MPI

    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    return UserError(f"the MPI library ({library}) does not serve: {why}. Use one with MPI_THREAD_MULTIPLE.")


def _other_library(seen: str) -> UserError:
    from mpi4py import MPI

    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    return UserError(
        f"{seen}: its MPI library ({library}) is not the launcher's. Use the mpirun of this library, or name the "
        "launcher's own by MPI4PY_LIBMPI=/path/libmpi.so."
    )
