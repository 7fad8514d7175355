"""Result of a translation from verl: a config, the command that starts it, and the settings left out."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from mrl.commands.from_verl.batch_job import BatchJob
from mrl.errors import printable


@dataclass
class Translation:
    """Config of mrl, and the settings that are not in it.

    Attributes:
        text: Config as YAML, without values that are mrl's defaults.
        num_nodes: Number of hosts.
        gpus_per_node: Ranks per host.
        mpi: True if the ranks of a rollout replica communicate over MPI.
        batch_job: Job of SLURM that starts the verl run; None: SLURM does not.
        missing: Settings that mrl does not support, each with the reason.
        lost: Keys of `missing` whose absence changes the training.
        moot: Settings that mrl does not need, each with the reason.
        differs: Translated settings with another effect in mrl.
    """

    text: str = ""
    num_nodes: int = 1
    gpus_per_node: int = 1
    mpi: bool = False
    batch_job: BatchJob | None = None
    missing: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    moot: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def command(self, config: str) -> str:
        """Returns the command line that starts the run.

        Args:
            config: Path of the config.
        """
        size = f"--nodes {self.num_nodes} --gpus-per-node {self.gpus_per_node}"
        if self.batch_job is not None:
            mode, variables = (" --mode srun", "SRUN_ARGS=--mpi=pmix ") if self.mpi else ("", "")
            arguments = self.batch_job.launcher_args
            more = f" {shlex.quote(f'--launcher-args={arguments}')}" if arguments else ""
            return f"{variables}mrl launch --via {self.via} {size}{mode}{more} {config}"
        if self.world_size == 1:
            return f"mrl train {config}"
        words = f"mrl launch --via {self.via} {size}"
        if self.via == "torchrun" and self.num_nodes > 1:
            words += " --master-addr FIRST_HOST --node-rank K"
        return f"{words} {config}"

    def add_missing(self, line: str, *, lost: bool) -> None:
        """Adds a line to `missing`, and to `lost` if the run may train something else without the setting."""
        self.missing.append(line)
        if lost:
            self.lost.append(line)

    @property
    def via(self) -> str:
        """Launcher, an option of `mrl launch --via`."""
        if self.batch_job is not None:
            return "sbatch"
        return "mpirun" if self.mpi else "torchrun"

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.num_nodes * self.gpus_per_node

    def document(self, config: str) -> str:
        """Returns the config as YAML, below comments with its world size, its command, and what was lost.

        Args:
            config: Path of the config.
        """
        size = f"world size {self.world_size}: {self.num_nodes} host(s) of {self.gpus_per_node} GPU(s)"
        lines = [f"Translated by `mrl from-verl` for a {size}.", f"Start it with: {self.command(config)}"]
        if self.lost:
            lines += ["", "LOST: these settings change what the verl run trains, and this config does not have them:"]
            lines += [f"- {line}" for line in self.lost]
        comments = (f"# {_one_line(line)}".rstrip() for line in lines)
        return "\n".join([*comments, "", self.text])


def _one_line(text: str) -> str:
    """Returns text that YAML accepts in a comment: line ends and characters that are not printable are escaped."""
    return printable(text.replace("\n", "\\n").replace("\t", " "))
