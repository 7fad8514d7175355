"""The part of the job that TensorRT-LLM sees: environment variables of the launcher, and MPI ranks."""

from __future__ import annotations

import importlib
from typing import Any

from mrl.distributed import launch, mpi
from mrl.distributed.launcher_env import LauncherEnv
from mrl.engines.trtllm.fields import not_over_mpi
from mrl.engines.trtllm.replica import Replica
from mrl.errors import UserError, first_line

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of torchrun that TensorRT-LLM must not interpret as its own."""

MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MPI_", "UCX_", "I_MPI_", "HYDRA_", "MPICH_", "MV2_")
"""Variables of an MPI that started torchrun instead of the ranks; MPI_Init in a rank would join as the wrong process.
"""

OWN_PREFIXES = ("TLLM_SPAWN_PROXY_PROCESS", "TLLM_DISABLE_MPI", "tllm_mpi_size")
"""Variables of TensorRT-LLM that make it start Ray or search for workers."""


IMPORT_SETTINGS = {"DISABLE_TORCH_DEVICE_SET": "1", "TRTLLM_NO_USAGE_STATS": "1"}
"""Environment for importing TensorRT-LLM without an engine: keep the current device, send no usage statistics."""


def hidden_variables(launcher: str) -> tuple[str, ...]:
    """Returns the prefixes of environment variables to hide from TensorRT-LLM."""
    started_by_mpi = launcher in ("mpirun", "mpi", "srun")
    return (*LAUNCHER_PREFIXES, *LAUNCHER_NAMES, *OWN_PREFIXES, *(() if started_by_mpi else MPI_PREFIXES))


def is_over_mpi(environment: LauncherEnv) -> bool:
    """Returns whether MPI started the ranks."""
    alone = environment.launcher == "srun" and mpi.is_single_rank()
    return environment.launcher not in ("none", "torchrun") and not alone


def import_without_engine() -> None:
    """Collective over the job: imports TensorRT-LLM on a rank without an engine, where MPI started the ranks.

    The import splits MPI's world communicator by host (`_utils.local_comm`), which is collective over all ranks.

    Raises:
        UserError: The import fails.
    """
    environment = launch.get_launcher_env()
    if not is_over_mpi(environment):
        return
    with launch.scrubbed_env(hide=hidden_variables(environment.launcher), given=IMPORT_SETTINGS):
        try:
            importlib.import_module("tensorrt_llm._utils")
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            raise UserError(
                f"TensorRT-LLM cannot be imported on a training-only rank ({first_line(error)}): over MPI its import "
                "is collective over all ranks. Start every rank in the same container."
            ) from error


def communicator_of(replica: Replica, name: str) -> Any:
    """Collective over the replica: returns its MPI communicator; None where MPI did not start the ranks.

    Args:
        replica: Replica of this rank.
        name: Value of `rollout.name`.

    Raises:
        UserError: The replica needs MPI and MPI did not start the ranks, or MPI does not support threads.
    """
    environment = launch.get_launcher_env()
    if not is_over_mpi(environment):
        if replica.size > 1:
            raise UserError(not_over_mpi(name, environment.launcher, replica.size))
        return None
    ranks = range(replica.first_rank, replica.first_rank + replica.size)
    communicator = mpi.sub_communicator(ranks, environment)
    mpi.check_threads()  # TensorRT-LLM communicates in a separate thread
    return communicator


def set_world_communicator(communicator: Any) -> Any:
    """Sets the replica as TensorRT-LLM's world communicator, in Python and in C++.

    Python's communicator is used by its own exchanges and the custom all-reduce (`_utils.mpi_comm`), the C++ one for
    the rank numbers of NCCL.

    Args:
        communicator: MPI communicator of the replica's ranks, in order.

    Returns:
        The communicator in TensorRT-LLM's wrapper class.
    """
    from tensorrt_llm import _utils
    from tensorrt_llm.llmapi.mpi_session import set_mpi_session_cpp

    own = type(_utils.mpi_comm())(communicator)  # some versions use mpi4py's wrapper for large objects
    _utils.set_mpi_comm(own)
    set_mpi_session_cpp(own)
    return own
