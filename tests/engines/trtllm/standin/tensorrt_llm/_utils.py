"""MPI as the rest of the package sees it: COMM_WORLD where mpirun started this process, else one process alone."""

import os

from tensorrt_llm.faults import StandInError
from tests.engines.trtllm.signature import signed

UCC = "OMPI_MCA_coll_ucc_enable"
"""Set to 0 by `import tensorrt_llm`: collectives of MPI's UCC component go wrong with it. MPI_Init reads it."""


class _Alone:
    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def Split_type(self, split_type):
        return self


def _world():
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return _Alone()
    from mpi4py import MPI

    if os.environ.get(UCC) != "0":
        raise StandInError(f"MPI was started without {UCC}=0, which comes too late with this import")
    return MPI.Intracomm(MPI.COMM_WORLD)


world = comm = _world()
local_comm = comm.Split_type(9)
"""The ranks of this host, of all replicas (OMPI_COMM_TYPE_HOST)."""


@signed("tensorrt_llm._utils.set_mpi_comm")
def set_mpi_comm(new_comm):
    global comm  # noqa: PLW0603 -- as the real one has it
    comm = new_comm


def mpi_comm():
    return comm


def local_mpi_rank():
    return local_comm.Get_rank()


def global_mpi_rank():
    return world.Get_rank()
