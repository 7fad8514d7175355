"""What TensorRT-LLM sees of the job around it: which of the launcher's variables, and which of MPI's ranks.

Owns both, for the LLM API and for built engines.
"""

from __future__ import annotations

import importlib
from typing import Any

from mrl.distributed import launch, mpi
from mrl.distributed.launcher_env import Environment
from mrl.engines.trtllm.fields import not_over_mpi
from mrl.engines.trtllm.replica import Replica
from mrl.errors import UserError, first_line

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Of torchrun: TensorRT-LLM must not take them for its own."""

MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MPI_", "UCX_", "I_MPI_", "HYDRA_", "MPICH_", "MV2_")
"""Of an MPI that started torchrun and not its ranks: MPI_Init in a rank would take a place that is not its own."""

OWN_PREFIXES = ("TLLM_SPAWN_PROXY_PROCESS", "TLLM_DISABLE_MPI", "tllm_mpi_size")
"""Of TensorRT-LLM: they make it start Ray or look for workers."""


BESIDE = {"DISABLE_TORCH_DEVICE_SET": "1", "TRTLLM_NO_USAGE_STATS": "1"}
"""For its import without an engine: the device stays, and nothing is sent."""


def hidden(launcher: str) -> tuple[str, ...]:
    """Prefixes of variables that TensorRT-LLM must not see."""
    started_by_mpi = launcher in ("mpirun", "mpi", "srun")
    return (*LAUNCHER_PREFIXES, *LAUNCHER_NAMES, *OWN_PREFIXES, *(() if started_by_mpi else MPI_PREFIXES))


def is_over_mpi(environment: Environment) -> bool:
    """Whether MPI started the ranks."""
    alone = environment.launcher == "srun" and mpi.is_alone()
    return environment.launcher not in ("none", "torchrun") and not alone


def start_beside() -> None:
    """Collective over the job: imports TensorRT-LLM on a rank that holds no engine, where MPI started the ranks.

    Its import splits the whole world of MPI by host (`_utils.local_comm`), and would wait for this rank.

    Raises:
        UserError: It does not import.
    """
    environment = launch.environment()
    if not is_over_mpi(environment):
        return
    with launch.scrubbed_variables(hide=hidden(environment.launcher), given=BESIDE):
        try:
            importlib.import_module("tensorrt_llm._utils")
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            raise UserError(
                f"TensorRT-LLM does not import on a rank that only trains ({first_line(error)}): over MPI its import "
                "takes part of all ranks. Start every rank in the same container."
            ) from error


def communicator_of(replica: Replica, name: str) -> Any:
    """Collective over the replica: MPI's communicator of it; None where MPI did not start the ranks.

    Args:
        replica: Of this rank.
        name: `rollout.name`.

    Raises:
        UserError: The replica needs MPI and there is none, or it allows no threads.
    """
    environment = launch.environment()
    if not is_over_mpi(environment):
        if replica.size > 1:
            raise UserError(not_over_mpi(name, environment.launcher, replica.size))
        return None
    ranks = range(replica.first_rank, replica.first_rank + replica.size)
    communicator = mpi.among(ranks, environment)
    mpi.check_threads()  # TensorRT-LLM talks in a thread of its own
    return communicator


def adopt(communicator: Any) -> Any:
    """Makes the replica the whole world of TensorRT-LLM, on its Python side and on its C++ side.

    Python's is what its own exchanges and the memory of the custom all-reduce are split from (`_utils.mpi_comm`), C++'s
    is what NCCL's ranks are numbered by.

    Args:
        communicator: MPI's, of the replica's ranks in their order.

    Returns:
        It, as TensorRT-LLM wraps communicators.
    """
    from tensorrt_llm import _utils
    from tensorrt_llm.llmapi.mpi_session import set_mpi_session_cpp

    own = type(_utils.mpi_comm())(communicator)  # mpi4py's wrapper for large objects, where that is what it uses
    _utils.set_mpi_comm(own)
    set_mpi_session_cpp(own)
    return own
