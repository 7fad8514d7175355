"""MPI ranks of a job: sizes, a broadcast, sub-communicators, and the end of MPI.

mpi4py (extra `mpi`) is imported only if mpirun started the ranks. `finalize` finalizes MPI, not the exit of the
process, where a failed rank would wait for the others. A program that initialized MPI before it called mrl finalizes it
itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mrl.distributed.launcher_env import LauncherEnv
from mrl.errors import UserError, first_line, to_install

MPI_MODULE = "mpi4py.MPI"
"""Module whose import initializes MPI."""

SIZE_BYTES = 8
"""Bytes of the length prefix of a message."""


def add_mpi_sizes(launcher_env: LauncherEnv) -> LauncherEnv:
    """Collective over all ranks: returns `launcher_env` with the sizes and the local rank that MPI knows.

    Raises:
        UserError: mpi4py is missing, or its MPI library is not the launcher's.
    """
    world = _world()
    if world.Get_rank() != launcher_env.rank:
        raise _other_library(f"the launcher started rank {launcher_env.rank}, but mpi4py sees rank {world.Get_rank()}")
    from mpi4py.MPI import COMM_TYPE_SHARED

    host = world.Split_type(COMM_TYPE_SHARED)
    return replace(
        launcher_env,
        world_size=world.Get_size(),
        local_rank=host.Get_rank(),
        local_world_size=host.Get_size(),
        num_nodes=world.allreduce(int(host.Get_rank() == 0)),
    )


def broadcast(value: Any, environment: LauncherEnv) -> Any:
    """Collective over all ranks: broadcasts rank 0's value, which JSON must be able to represent.

    Raises:
        UserError: mpi4py is missing, or its MPI library is not the launcher's.
    """
    world = _checked_world(environment)
    payload = bytearray(json.dumps(value).encode() if environment.rank == 0 else b"")
    size = bytearray(len(payload).to_bytes(SIZE_BYTES, "big"))
    world.Bcast(size, root=0)  # lower-case `bcast` would unpickle what it receives
    payload.extend(bytes(int.from_bytes(size, "big") - len(payload)))
    world.Bcast(payload, root=0)
    return json.loads(payload)


def sub_communicator(ranks: Sequence[int], environment: LauncherEnv) -> Any:
    """Collective over `ranks`: returns their communicator, in this order; other ranks need not call it.

    Raises:
        UserError: mpi4py is missing, or its MPI library is not the launcher's.
    """
    world = _checked_world(environment)
    return world.Create_group(world.Get_group().Incl(list(ranks)))


def is_single_rank() -> bool:
    """Returns whether MPI sees this process as its only rank, or there is no MPI.

    True for each rank of `srun` without --mpi, and for a job of one rank.
    """
    try:
        return int(_world().Get_size()) == 1
    except UserError:
        return True


def check_threads() -> None:
    """Checks that several threads of this process may call MPI concurrently.

    Raises:
        UserError: The MPI library does not support MPI_THREAD_MULTIPLE.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            f"the MPI library ({_library()}) lets only one thread of a process call MPI at a time, and several must "
            "here. Use one with MPI_THREAD_MULTIPLE."
        )


def finalize() -> None:
    """Collective over all ranks: finalizes MPI if mrl initialized it."""
    if not _initialized:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def _checked_world(environment: LauncherEnv) -> Any:
    """Returns MPI's world communicator after checking that it has all ranks of the launcher."""
    world = _world()
    size = world.Get_size()
    if size != environment.world_size:
        raise _other_library(f"the launcher started {environment.world_size} ranks, but mpi4py sees {size}")
    return world


_initialized: list[str] = []
"""Contains MPI_MODULE once mrl has initialized MPI."""


@cache
def _world() -> Any:
    initializes = MPI_MODULE not in sys.modules
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library to load
        raise UserError(
            f"mpirun started the ranks, which requires mpi4py and an MPI library ({first_line(error)}). Install "
            f"it: {to_install('mpi')}; or start with torchrun or srun, which do not use MPI."
        ) from error
    if initializes:
        _initialized.append(MPI_MODULE)
    return MPI.COMM_WORLD


def _library() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version().replace("\0", "").splitlines()[0])


def _other_library(mismatch: str) -> UserError:
    return UserError(
        f"{mismatch}: its MPI library ({_library()}) is not the launcher's. Use the mpirun of this library, or set "
        "MPI4PY_LIBMPI=/path/libmpi.so to the launcher's library."
    )
