"""Options of SLURM's sbatch in a script, and the environment variables that SLURM derives from them.

Source: SLURM's documentation of sbatch, "INPUT ENVIRONMENT VARIABLES" and "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_SHORT = {"-N": "nodes", "-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-C": "constraint",
          "-J": "job-name", "-c": "cpus-per-task"}  # fmt: skip
PASSED = ("partition", "account", "qos", "time", "constraint", "reservation")
"""Options that apply to the job on this cluster, whatever program it runs."""
_STARTS = re.compile(r"(?m)^(?!\s*#).*?(?<![\w./-])(?:srun|sbatch)\s")


@dataclass(frozen=True)
class BatchJob:
    """Job of SLURM.

    Attributes:
        options: Long option of sbatch -> its value.
    """

    options: dict[str, str] = field(default_factory=dict)

    @property
    def launcher_args(self) -> str:
        """Options to repeat, as the text of `mrl launch --launcher-args`."""
        return shlex.join(f"--{name}={self.options[name]}" for name in PASSED if name in self.options)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of the job's first process, as far as the options determine them."""
        gpus = self.options.get("gpus-per-node", "") or _gpus(self.options.get("gres", ""))
        per_node = re.search(r"\d+$", gpus)
        values = {
            "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
            "SLURM_NNODES": self._num_nodes, "SLURM_JOB_NUM_NODES": self._num_nodes,
            "SLURM_NTASKS_PER_NODE": self.options.get("ntasks-per-node"),
            "SLURM_CPUS_PER_TASK": self.options.get("cpus-per-task"),
            "SLURM_JOB_NAME": self.options.get("job-name"),
            "SLURM_GPUS_PER_NODE": per_node and per_node[0], "SLURM_GPUS_ON_NODE": per_node and per_node[0],
        }  # fmt: skip
        return {name: value for name, value in values.items() if value}

    @property
    def _num_nodes(self) -> str | None:
        """Number of nodes; the least of a range."""
        given = self.options.get("nodes")
        return given and given.partition("-")[0]


def _gpus(resources: str) -> str:
    """Returns the GPUs in the value of `--gres`, such as "gpu:h100:8"."""
    return next((one for one in resources.split(",") if one.startswith("gpu:")), "")


def batch_job(script: str) -> BatchJob | None:
    """Returns the job of a script with `#SBATCH` lines, or with lines that start srun or sbatch; None for others."""
    lines = re.findall(r"(?m)^#SBATCH[ \t]+(.*)$", script)
    if not lines and _STARTS.search(script) is None:
        return None
    return BatchJob({name: value for line in lines for name, value in _options(_words(line))})


def job_of_words(words: Sequence[str]) -> BatchJob | None:
    """Returns the job of a command line that starts with srun or sbatch; None for others."""
    starts = [index for index, word in enumerate(words) if word.rpartition("/")[2] in ("srun", "sbatch")]
    return BatchJob(dict(_options(words[starts[0] + 1 :]))) if starts else None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields long names and values: `--name=value`, `--name value`, `-N 4` and `-N4`."""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:] or following
