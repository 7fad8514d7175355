"""What each launcher's real variables mean, which launcher wins, and what is told where they do not fit.

The dictionaries are what OpenMPI 4.1.4, MPICH 5.0.2, SLURM 22.05 and torch 2.13 left in the environment of a rank.
"""

import pytest

from mrl.distributed.launcher_env import FIRST_PORT, NUM_PORTS, LauncherEnv, device_index, read_launcher_env
from mrl.errors import UserError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_UNIVERSE_SIZE": "4", "PMIX_RANK": "3", "PMIX_NAMESPACE": "884801537",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4",
}  # fmt: skip
STEP = BATCH | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "6", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
ONE_PER_NODE = STEP | {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "h", "MASTER_PORT": "5"}
PLACE = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "num_nodes": 2}
OF_STEP = {"launcher": "srun", "address": "node1", "port": FIRST_PORT + 12351 % NUM_PORTS}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LauncherEnv()),
        ({"MASTER_ADDR": "node9", "MASTER_PORT": "1"}, LauncherEnv()),
        (BATCH, LauncherEnv()),
        (TORCHRUN, LauncherEnv(**PLACE, launcher="torchrun", address="node1", port=29400)),
        (TORCHRUN | ONE_PER_NODE, LauncherEnv(**PLACE, launcher="torchrun", address="node1", port=29400)),
        (OPENMPI, LauncherEnv(**PLACE, launcher="mpirun")),
        (OPENMPI | ONE_PER_NODE, LauncherEnv(**PLACE, launcher="mpirun")),
        (HYDRA, LauncherEnv(**PLACE, launcher="mpirun")),
        (HYDRA | ONE_PER_NODE, LauncherEnv(**PLACE, launcher="mpirun")),
        (HYDRA | MEETING, LauncherEnv(**PLACE, launcher="mpirun", address="h", port=5)),
        (STEP, LauncherEnv(**PLACE, **OF_STEP)),
        (STEP | {"SLURM_CPUS_PER_TASK": "12"}, LauncherEnv(**PLACE, **OF_STEP, num_cpus=12)),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11"}, LauncherEnv(**PLACE, **OF_STEP)),
        (STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.4.0"}, LauncherEnv(**PLACE, **OF_STEP)),
        (STEP | {"MASTER_ADDR": "10.0.0.1"}, LauncherEnv(**PLACE, **(OF_STEP | {"address": "10.0.0.1"}))),
        (STEP | {"MASTER_PORT": "29500"}, LauncherEnv(**PLACE, **(OF_STEP | {"port": 29500}))),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1"}, LauncherEnv(3, launcher="mpi")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, LauncherEnv(3, launcher="mpi")),
    ],
    ids=[
        "alone", "alone with a rendezvous", "batch script of SLURM", "torchrun", "torchrun in srun", "OpenMPI",
        "OpenMPI in an allocation", "MPICH", "MPICH in an allocation", "MPICH with a rendezvous", "srun",
        "srun with cores", "srun with PMI2", "srun with PMIx", "srun with an address", "srun with a port",
        "another PMIx", "another PMI",
    ],
)  # fmt: skip
def test_a_launchers_variables(variables, expected):
    assert read_launcher_env(variables) == expected


def test_ranks_set_by_hand_in_a_step_must_be_its_own():
    by_hand = STEP | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    by_hand |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    assert read_launcher_env(by_hand).launcher == "torchrun"
    with pytest.raises(UserError, match="RANK=2 SLURM_PROCID=3 WORLD_SIZE=4 SLURM_STEP_NUM_TASKS=4.* Unset RANK"):
        read_launcher_env(by_hand | {"RANK": "2"})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 contradict each other"),
        (TORCHRUN | {"RANK": "x"}, "RANK=x WORLD_SIZE=4 .* not all of them are integers"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
        (TORCHRUN | STEP, "SLURM_STEP_NUM_TASKS=4 GROUP_WORLD_SIZE=2: srun started 4 task.s., .* one of 2. Start one"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=3 .* contradict"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "but not OMPI_COMM_WORLD_RANK, .* a launcher.s variables are incomplete"),
        (STEP | {"PMI_RANK": "0"}, "PMI_RANK=0 SLURM_PROCID=3: MPI and SLURM disagree"),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "1"}, "PMI_SIZE=1 SLURM_STEP_NUM_TASKS=4: MPI and SLURM disagree"),
        (STEP | {"PMIX_RANK": "1"}, "PMIX_RANK=1 SLURM_PROCID=3: MPI and SLURM disagree"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "SLURM_STEP_TASKS_PER_NODE=2,1 contradict each other"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not of the form"),
        (STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but .* has 2 node"),
        ({k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"}, "but not SLURM_STEP_NODELIST"),
    ],
    ids=[
        "half of torchrun", "rank over size", "not a number", "no port", "too many torchruns", "MPI rank over size",
        "half of OpenMPI", "other PMI rank", "other PMI size", "other PMIx rank", "other tasks", "no tasks",
        "other nodes", "no nodes",
    ],
)  # fmt: skip
def test_variables_that_do_not_fit_are_named_with_what_to_do(variables, said):
    with pytest.raises(UserError, match=said):
        read_launcher_env(variables)


def test_two_steps_of_a_job_meet_at_two_ports():
    assert read_launcher_env(STEP).port != read_launcher_env(STEP | {"SLURM_STEP_ID": "7"}).port


@pytest.mark.parametrize(
    ("launcher", "num_devices", "index"),
    [("torchrun", 2, 1), ("mpirun", 8, 1), ("srun", 2, 1), ("srun", 1, 0)],
)
def test_the_device_of_a_rank(launcher, num_devices, index):
    assert device_index(LauncherEnv(**PLACE, launcher=launcher), num_devices) == index


def test_ranks_without_a_device_of_their_own_are_refused():
    with pytest.raises(UserError, match=r"2 ranks on this host, but torch sees 1 CUDA device\(s\)"):
        device_index(LauncherEnv(**PLACE, launcher="torchrun"), 1)
