"""MPI as the rest of the package sees it: COMM_WORLD where mpirun started this process, else one process alone."""

import os

from tests.trtllm.signature import signed


class _Alone:
    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1


def _world():
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return _Alone()
    from mpi4py import MPI

    return MPI.Intracomm(MPI.COMM_WORLD)


world = comm = _world()


@signed("tensorrt_llm._utils.set_mpi_comm")
def set_mpi_comm(new_comm):
    global comm  # noqa: PLW0603 -- as the real one has it
    comm = new_comm


def mpi_comm():
    return comm


def global_mpi_rank():
    return world.Get_rank()
