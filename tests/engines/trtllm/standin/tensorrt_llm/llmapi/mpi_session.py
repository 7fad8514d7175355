"""Which communicator TensorRT-LLM's C++ side takes for its world, and the base of sessions that start workers."""

from tensorrt_llm.bindings import MpiComm
from tests.engines.trtllm.signature import signed


@signed("tensorrt_llm.llmapi.mpi_session.set_mpi_session_cpp")
def set_mpi_session_cpp(comm):
    MpiComm.set_raw_mpi_session_by_fortran_handle(comm.py2f())


class MpiSession:
    """Abstract in the real package too."""
