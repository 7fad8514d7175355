"""Parser of the launchers' environment variables: torchrun, mpirun, srun, or none of them.

It takes a mapping, not os.environ (`launch.py` passes that), checks that the variables agree, and imports neither torch
nor MPI.

    torchrun        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpirun          OpenMPI's OMPI_COMM_WORLD_*; MPICH's and Intel's PMI_* with MPI_LOCAL*
    srun            SLURM_* of a job step, with any --mpi; the PMI_* or PMIX_RANK that --mpi adds must agree
    mpi             PMI or PMIx of another process manager: only the MPI library knows the sizes (`mpi.py`)

The innermost launcher wins: torchrun in a step of srun, mpirun in an allocation of SLURM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mrl.distributed.host_list import first_host, num_tasks_on_node
from mrl.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")

FIRST_PORT, NUM_PORTS = 20000, 12000
"""Ports of SLURM's jobs: below 32768, where Linux takes the ports of outgoing connections from."""


@dataclass(frozen=True)
class LauncherEnv:
    """Ranks, sizes and rendezvous address of this process, from the launcher's variables.

    Attributes:
        rank: Rank over all hosts, 0 .. world_size-1.
        world_size: Number of processes of the job.
        local_rank: Rank on this host, 0 .. local_world_size-1.
        local_world_size: Number of processes of the job on this host.
        num_nodes: Number of hosts; if the launcher does not set it, world_size / local_world_size, rounded up.
        launcher: Program that started the ranks; "mpi": an unknown one with PMI or PMIx.
        address: Host of rank 0, which serves the store; "": rank 0 broadcasts it over MPI.
        port: Port of the store; 0: rank 0 picks a free one and broadcasts it over MPI.
        num_cpus: CPU cores that the launcher reserved for this rank; 0: unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    launcher: Literal["none", "torchrun", "mpirun", "srun", "mpi"] = "none"
    address: str = ""
    port: int = 0
    num_cpus: int = 0


def read_launcher_env(variables: Mapping[str, str]) -> LauncherEnv:
    """Returns the launcher's environment in `variables`; of launcher "mpi" only the rank is known.

    Raises:
        UserError: A launcher's variables are incomplete, or they contradict each other or another launcher's.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    for names in (OPENMPI, HYDRA):
        if names[-1] in variables:
            return _mpirun(variables, names)
    if "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
        return _srun(variables)
    if "PMI_RANK" in variables or "PMIX_RANK" in variables:
        (rank,) = _numbers(variables, ("PMI_RANK" if "PMI_RANK" in variables else "PMIX_RANK",))
        return LauncherEnv(rank, launcher="mpi", address=variables.get("MASTER_ADDR", ""), port=_port(variables, 0))
    return LauncherEnv()


def device_index(environment: LauncherEnv, num_devices: int) -> int:
    """Returns the index of this rank's CUDA device among those that it sees.

    Raises:
        UserError: This host has more ranks than devices.
    """
    if num_devices >= environment.local_world_size:
        return environment.local_rank
    if num_devices == 1 and environment.launcher == "srun":  # --gpus-per-task: each rank sees its own device only
        return 0
    raise UserError(
        f"{environment.local_world_size} ranks on this host, but torch sees {num_devices} CUDA device(s). Start one "
        "rank per device (NPROC_PER_NODE, --gpus-per-node), or make all devices of the host visible to all ranks "
        "(CUDA_VISIBLE_DEVICES)."
    )


def _torchrun(variables: Mapping[str, str]) -> LauncherEnv:
    missing = [name for name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise UserError(
            f"the environment has some of torchrun's variables, but not {', '.join(missing)}. Start with "
            "`torchrun --nproc-per-node N -m mrl ...`, or unset RANK and WORLD_SIZE for a single process."
        )
    rank, size, local_rank, local_size = _numbers(variables, TORCHRUN)
    _check_ranks(variables, TORCHRUN)
    num_nodes = _num_nodes(size, local_size)
    if "GROUP_WORLD_SIZE" in variables:
        (num_nodes,) = _numbers(variables, ("GROUP_WORLD_SIZE",))
    _check_torchrun_in_step(variables)
    address, port = variables["MASTER_ADDR"], _port(variables, 0)
    return LauncherEnv(rank, size, local_rank, local_size, num_nodes, "torchrun", address, port)


def _check_torchrun_in_step(variables: Mapping[str, str]) -> None:
    """Checks that each task of a SLURM step is one torchrun of the job, or one rank if RANK was set by hand."""
    if "SLURM_STEP_ID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return
    (num_tasks,) = _numbers(variables, ("SLURM_STEP_NUM_TASKS",))
    if "GROUP_WORLD_SIZE" in variables:
        (num_agents,) = _numbers(variables, ("GROUP_WORLD_SIZE",))
        if num_agents != num_tasks:
            raise UserError(
                f"{_shown(variables, ('SLURM_STEP_NUM_TASKS', 'GROUP_WORLD_SIZE'))}: srun started {num_tasks} "
                f"task(s), but this torchrun is one of {num_agents}. Start one torchrun for each node, with "
                "`srun --ntasks-per-node=1` and --nnodes equal to SLURM's nodes, or start the ranks with srun and "
                "without torchrun (launch/slurm.sbatch does either)."
            )
    elif _numbers(variables, ("RANK", "WORLD_SIZE")) != _numbers(variables, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        names = ("RANK", "SLURM_PROCID", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
        raise UserError(
            f"{_shown(variables, names)}: RANK and WORLD_SIZE differ from those of this srun task. Unset RANK, "
            "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: srun's own variables are enough."
        )


def _mpirun(variables: Mapping[str, str], names: Sequence[str]) -> LauncherEnv:
    rank, size, local_rank, local_size = _numbers(variables, names)
    _check_ranks(variables, names)
    num_nodes = _num_nodes(size, local_size)
    address, port = variables.get("MASTER_ADDR", ""), _port(variables, 0)
    return LauncherEnv(rank, size, local_rank, local_size, num_nodes, "mpirun", address, port)


def _srun(variables: Mapping[str, str]) -> LauncherEnv:
    rank, size, local_rank, node, num_nodes = _numbers(variables, SLURM_STEP)
    for pmi, slurm in (("PMI_RANK", SLURM_STEP[0]), ("PMI_SIZE", SLURM_STEP[1]), ("PMIX_RANK", SLURM_STEP[0])):
        if pmi in variables and _numbers(variables, (pmi,)) != _numbers(variables, (slurm,)):
            raise UserError(
                f"{_shown(variables, (pmi, slurm))}: MPI and SLURM disagree on the rank or the size of the job. An "
                "mpirun other than OpenMPI's and MPICH's inside srun causes this. Start the ranks with srun alone, or "
                "with mpirun outside of a step."
            )
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    _check_present(variables, names)
    tasks, hosts = (variables[name] for name in names)
    local_size = num_tasks_on_node(tasks, node)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size and node < num_nodes):
        raise UserError(
            f"{_shown(variables, (*SLURM_STEP, names[0]))} contradict each other. Start a new step with srun."
        )
    job, step = _numbers(variables, ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    num_cpus = _numbers(variables, ("SLURM_CPUS_PER_TASK",))[0] if "SLURM_CPUS_PER_TASK" in variables else 0
    return LauncherEnv(
        rank, size, local_rank, local_size, num_nodes, "srun",
        address=variables.get("MASTER_ADDR") or first_host(hosts),
        port=_port(variables, FIRST_PORT + (job + step) % NUM_PORTS),
        num_cpus=num_cpus,
    )  # fmt: skip


def _port(variables: Mapping[str, str], otherwise: int) -> int:
    if "MASTER_PORT" not in variables:
        return otherwise
    (port,) = _numbers(variables, ("MASTER_PORT",))
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} is not a port: give a free one from 1024 to 65535, or unset it.")
    return port


def _num_nodes(size: int, local_size: int) -> int:
    return -(-size // local_size)


def _check_present(variables: Mapping[str, str], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        there = [name for name in names if name in variables]
        raise UserError(
            f"the environment has {_shown(variables, there) or 'a SLURM step'}, but not {', '.join(missing)}: a "
            "launcher's variables are incomplete. Start with the launcher, or unset them for a single process."
        )


def _numbers(variables: Mapping[str, str], names: Sequence[str]) -> list[int]:
    _check_present(variables, names)
    try:
        return [int(variables[name]) for name in names]
    except ValueError as error:
        raise UserError(f"{_shown(variables, names)}: not all of them are integers ({error}).") from error


def _check_ranks(variables: Mapping[str, str], names: Sequence[str]) -> None:
    """Checks the values of `names`: rank, world size, local rank and local world size."""
    rank, size, local_rank, local_size = _numbers(variables, names)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(
            f"{_shown(variables, names)} contradict each other: a rank must be at least 0 and below its size. Unset "
            "variables left over from an earlier launcher."
        )


def _shown(variables: Mapping[str, str], names: Sequence[str]) -> str:
    return " ".join(f"{name}={variables.get(name, '(unset)')}" for name in names)
