"""`mrl launch`: selects a script of launch/ and builds its environment variables and arguments."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next((path for path in (_PACKAGE / "launch", _PACKAGE.parent / "launch") if path.is_dir()), Path("launch"))
"""Folder of the launch scripts: inside the package in a wheel, next to the package in a clone."""
SCRIPTS = {"torchrun": "torchrun.sh", "mpirun": "mpirun.sh", "sbatch": "slurm.sbatch"}


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `mrl launch`.

    Attributes:
        via: Launcher, a key of SCRIPTS.
        nodes: Number of hosts.
        ranks_per_node: Ranks per host, one per GPU.
        gpus: True to request GPUs from the scheduler.
        mode: Program that starts the ranks of a node under sbatch, torchrun or srun.
        container_image: Image that sbatch runs in; "": no container.
        container_mounts: Mounts of the container, FROM:TO, separated by commas.
        container_runtime: Program that opens the image, pyxis or apptainer.
        node_rank: Index of this host, for torchrun on several hosts.
        master_addr: Name or address of host 0, for torchrun on several hosts.
        arguments: Extra arguments for mpirun or sbatch.
    """

    via: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: bool = True
    mode: str = "torchrun"
    container_image: str = ""
    container_mounts: str = ""
    container_runtime: str = "pyxis"
    node_rank: int | None = None
    master_addr: str = ""
    arguments: Sequence[str] = ()

    @property
    def launcher(self) -> str:
        """Program that starts the rank processes, spelled as `LauncherEnv.launcher`."""
        return self.mode if self.via == "sbatch" else self.via


@dataclass(frozen=True)
class ShellCommand:
    """Shell command: environment variables and argv."""

    variables: dict[str, str]
    argv: list[str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def launch_command(start: LaunchOptions, words: Sequence[str], *, dry_run: bool = False) -> ShellCommand:
    """Returns the command that starts `mrl` with the arguments `argv` on every rank.

    Args:
        start: Launcher and job size.
        words: Arguments of `mrl`, for example ["train", "config.yaml"].
        dry_run: The script prints its command instead of running it.

    Raises:
        UserError: The options contradict each other, or the folder launch/ is missing.
    """
    script = FOLDER / SCRIPTS[start.via]
    if not script.is_file():
        raise UserError(f"{script} does not exist: this installation of mrl is incomplete. Reinstall mrl.")
    variables = {"torchrun": _torchrun, "mpirun": _mpirun, "sbatch": _sbatch}[start.via](start)
    if not start.container_image:
        variables = {"PYTHON": sys.executable, **variables}
    if dry_run:
        if start.via == "sbatch":
            variables = {**variables, "SLURM_NNODES": str(start.nodes)}
        return ShellCommand(variables, [str(script), "--dry-run", *words])
    if start.via != "sbatch":
        return ShellCommand(variables, [str(script), *words])
    resources = [f"--nodes={start.nodes}", *([f"--gpus-per-node={start.ranks_per_node}"] if start.gpus else [])]
    return ShellCommand(variables, ["sbatch", *resources, *start.arguments, str(script), *words])


def launch_argv(num_ranks: int, *, mpi: bool) -> str:
    """Returns the command that starts a job of `num_ranks` ranks, for printing.

    Args:
        num_ranks: World size.
        mpi: True if the rollout engine communicates over MPI and so needs mpirun or srun.
    """
    if num_ranks == 1:
        return "mrl train CONFIG"
    if mpi:
        return (
            f"NPROC={num_ranks} launch/mpirun.sh train CONFIG, or launch/slurm.sbatch with MODE=srun "
            "SRUN_ARGS=--mpi=pmix: the ranks of a TensorRT-LLM replica communicate over MPI"
        )
    scripts = ", ".join(f"launch/{script}" for script in SCRIPTS.values())
    return f"{num_ranks} ranks with `mrl launch --via {'|'.join(SCRIPTS)}`, or one of {scripts}"


def _torchrun(start: LaunchOptions) -> dict[str, str]:
    _refuse_sbatch_options(start)
    if start.arguments:
        raise UserError("--launcher-args is only for --via mpirun or sbatch.")
    variables = {"NPROC_PER_NODE": str(start.ranks_per_node)}
    if start.nodes == 1:
        return variables
    if start.node_rank is None or not start.master_addr:
        raise UserError(
            f"--via torchrun --nodes {start.nodes} needs --master-addr FIRST_HOST and --node-rank K (0 to "
            f"{start.nodes - 1}): run the command once per host. Or use --via sbatch or mpirun, which start all hosts."
        )
    if not 0 <= start.node_rank < start.nodes:
        raise UserError(f"--node-rank is {start.node_rank}, expected 0 to {start.nodes - 1} (--nodes {start.nodes}).")
    rendezvous = {"NNODES": str(start.nodes), "NODE_RANK": str(start.node_rank), "MASTER_ADDR": start.master_addr}
    return variables | rendezvous


def _mpirun(start: LaunchOptions) -> dict[str, str]:
    _refuse_sbatch_options(start)
    _refuse_torchrun_options(start)
    variables = {"NPROC": str(start.nodes * start.ranks_per_node)}
    return variables | ({"MPIRUN_ARGS": " ".join(start.arguments)} if start.arguments else {})


def _sbatch(start: LaunchOptions) -> dict[str, str]:
    _refuse_torchrun_options(start)
    variables = {"MODE": start.mode, "NPROC_PER_NODE": str(start.ranks_per_node)}
    container = {"CONTAINER_IMAGE": start.container_image, "CONTAINER_MOUNTS": start.container_mounts}
    if start.container_runtime != "pyxis":
        if not start.container_image:
            raise UserError(f"--container-runtime {start.container_runtime} needs --container-image IMAGE.")
        container["CONTAINER_RUNTIME"] = start.container_runtime
    return variables | {name: value for name, value in container.items() if value}


def _refuse_sbatch_options(start: LaunchOptions) -> None:
    container = start.container_image or start.container_mounts or start.container_runtime != "pyxis"
    if container or start.mode != "torchrun":
        raise UserError(
            "--mode, --container-image, --container-mounts and --container-runtime are only for --via sbatch."
        )


def _refuse_torchrun_options(start: LaunchOptions) -> None:
    if start.node_rank is not None or start.master_addr:
        raise UserError("--node-rank and --master-addr are only for --via torchrun.")
