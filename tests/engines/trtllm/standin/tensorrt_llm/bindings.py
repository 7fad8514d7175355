"""Stands in for the C++ bindings: the MPI communicator that the engine's own exchanges take."""

from __future__ import annotations


class MpiComm:
    _session = None

    @classmethod
    def set_raw_mpi_session_by_fortran_handle(cls, handle):
        from mpi4py import MPI

        cls._session = MPI.Comm.f2py(handle)

    @classmethod
    def size(cls):
        return 1 if cls._session is None else cls._session.Get_size()

    @classmethod
    def gather_all(cls, value, size):
        """Not in the real one: what each rank of the session holds."""
        return [value] if size == 1 else cls._session.allgather(value)
