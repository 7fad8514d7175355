"""`mrl launch`: which script of launch/ starts a job, with which variables and words.

Owns the way from the command line's options to the scripts' variables; what the scripts run is theirs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next((path for path in (_PACKAGE / "launch", _PACKAGE.parent / "launch") if path.is_dir()), Path("launch"))
"""The scripts: in a wheel inside the package, in a clone next to it."""
SCRIPTS = {"torchrun": "torchrun.sh", "mpirun": "mpirun.sh", "sbatch": "slurm.sbatch"}


@dataclass(frozen=True)
class Start:
    """How a job is to be started.

    Attributes:
        via: A key of SCRIPTS.
        nodes: Hosts.
        ranks_per_node: Ranks of each host, one for each GPU.
        gpus: Whether the scheduler is asked for GPUs.
        mode: With sbatch: who starts the ranks of a node, torchrun or srun.
        container_image: With sbatch: pyxis's image; "": none.
        container_mounts: With sbatch: pyxis's mounts.
        node_rank: With torchrun on several hosts: which of them this one is.
        master_addr: With torchrun on several hosts: name or address of the first one.
        arguments: Further words for mpirun or sbatch.
    """

    via: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: bool = True
    mode: str = "torchrun"
    container_image: str = ""
    container_mounts: str = ""
    node_rank: int | None = None
    master_addr: str = ""
    arguments: Sequence[str] = ()

    @property
    def launcher(self) -> str:
        """Who starts the ranks themselves, as `Environment.launcher` names it."""
        return self.mode if self.via == "sbatch" else self.via


@dataclass(frozen=True)
class Line:
    """A command with variables of its own, as a shell would read it."""

    variables: dict[str, str]
    words: list[str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.words)])


def line(start: Start, words: Sequence[str], *, dry_run: bool = False) -> Line:
    """The command that starts `mrl` with `words`.

    Args:
        start: Launcher and size.
        words: Of the command line after `mrl`.
        dry_run: The script prints what it would run and starts nothing.

    Raises:
        UserError: The options do not fit each other, or there is no folder launch/.
    """
    script = FOLDER / SCRIPTS[start.via]
    if not script.is_file():
        raise UserError(f"{script} does not exist: this copy of mrl lacks its scripts. Install mrl again.")
    variables = {"torchrun": _torchrun, "mpirun": _mpirun, "sbatch": _sbatch}[start.via](start)
    if not start.container_image:
        variables = {"PYTHON": sys.executable, **variables}
    if dry_run:
        if start.via == "sbatch":
            variables = {**variables, "SLURM_NNODES": str(start.nodes)}
        return Line(variables, [str(script), "--dry-run", *words])
    if start.via != "sbatch":
        return Line(variables, [str(script), *words])
    asked = [f"--nodes={start.nodes}", *([f"--gpus-per-node={start.ranks_per_node}"] if start.gpus else [])]
    return Line(variables, ["sbatch", *asked, *start.arguments, str(script), *words])


def start_words(num_ranks: int, *, mpi: bool) -> str:
    """How a job of so many ranks is started; `mpi`: its engine's ranks talk over MPI."""
    if num_ranks == 1:
        return "mrl train CONFIG"
    if mpi:
        return (
            f"NPROC={num_ranks} launch/mpirun.sh train CONFIG, or launch/slurm.sbatch with MODE=srun "
            "SRUN_ARGS=--mpi=pmix: TensorRT-LLM's ranks of a replica talk over MPI"
        )
    return f"{num_ranks} ranks by any of {', '.join(f'launch/{script}' for script in SCRIPTS.values())}"


def _torchrun(start: Start) -> dict[str, str]:
    _only_sbatch(start)
    if start.arguments:
        raise UserError("--launcher-args are for --via mpirun or sbatch.")
    variables = {"NPROC_PER_NODE": str(start.ranks_per_node)}
    if start.nodes == 1:
        return variables
    if start.node_rank is None or not start.master_addr:
        raise UserError(
            f"--via torchrun --nodes {start.nodes}: run the same command on each host, with --master-addr FIRST_HOST "
            f"and --node-rank 0 to {start.nodes - 1}; or use --via sbatch or mpirun, which start all hosts."
        )
    if not 0 <= start.node_rank < start.nodes:
        raise UserError(f"--node-rank {start.node_rank} is not one of 0 to {start.nodes - 1} (--nodes {start.nodes}).")
    several = {"NNODES": str(start.nodes), "NODE_RANK": str(start.node_rank), "MASTER_ADDR": start.master_addr}
    return variables | several


def _mpirun(start: Start) -> dict[str, str]:
    _only_sbatch(start)
    _only_torchrun(start)
    variables = {"NPROC": str(start.nodes * start.ranks_per_node)}
    return variables | ({"MPIRUN_ARGS": " ".join(start.arguments)} if start.arguments else {})


def _sbatch(start: Start) -> dict[str, str]:
    _only_torchrun(start)
    variables = {"MODE": start.mode, "NPROC_PER_NODE": str(start.ranks_per_node)}
    container = {"CONTAINER_IMAGE": start.container_image, "CONTAINER_MOUNTS": start.container_mounts}
    return variables | {name: value for name, value in container.items() if value}


def _only_sbatch(start: Start) -> None:
    if start.container_image or start.container_mounts or start.mode != "torchrun":
        raise UserError("--mode, --container-image and --container-mounts are for --via sbatch.")


def _only_torchrun(start: Start) -> None:
    if start.node_rank is not None or start.master_addr:
        raise UserError("--node-rank and --master-addr are for --via torchrun.")
