"""Environment with a Python tool: runs the model's program in a sandbox and returns what it printed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mrl.distributed.worker_processes.folders import remove, temporary_folder
from mrl.distributed.worker_processes.sandbox import SandboxLimits, run_python
from mrl.environments.base import Observation, Tool
from mrl.environments.toolbox import ToolEnvironment
from mrl.errors import UserError


@cache
def _missing() -> tuple[str, ...]:
    """Returns the parts of the sandbox that this machine does not support; checked once per worker."""
    with temporary_folder("probe") as folder:
        return run_python("", folder, SandboxLimits(time_s=60.0)).missing


class Python(ToolEnvironment):
    """Tool environment with `python`; the reward comes from the config's reward functions.

    The programs of an episode share one folder, so files persist between calls; variables do not.
    """

    def __init__(
        self, time_limit_s: float = 5.0, memory_limit_mb: int = 512, max_output_bytes: int = 10_000, strict: bool = True
    ) -> None:
        """Sets the limits of one program.

        Args:
            time_limit_s: Time limit of a program, s; should be below the environment's time limit per answer.
            memory_limit_mb: Memory limit of a program, MiB.
            max_output_bytes: Size of the printed output after which a program is killed, bytes.
            strict: True to refuse machines that lack a part of the sandbox; False to run programs without that part.
        """
        if not (time_limit_s > 0 and memory_limit_mb >= 64 and max_output_bytes > 0):
            raise UserError(
                f"python: time_limit_s={time_limit_s}, memory_limit_mb={memory_limit_mb}, max_output_bytes="
                f"{max_output_bytes}; expected numbers above 0, and at least 64 MiB."
            )
        self._bounds = SandboxLimits(time_limit_s, memory_limit_mb, max_output_bytes)
        self._folder = ""
        if strict and _missing():
            raise UserError(
                f"python: this machine does not support a part of the sandbox ({'; '.join(_missing())}). Set "
                "strict=false to run programs without it."
            )

    @property
    def tools(self) -> Sequence[Tool]:
        """The method `python`."""
        return (self.python,)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Makes the episode's folder."""
        self._folder = tempfile.mkdtemp(prefix="episode-")
        return Observation()

    def close(self) -> None:
        """Removes the episode's folder."""
        remove(self._folder)

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program. Print what you want to see.
        """
        ran = run_python(code, self._folder, self._bounds)
        if ran.problem:
            return f"{ran.output}\nError: {ran.problem}".lstrip()
        ended = f"Error: the program ended with signal {-ran.status}" if ran.status < 0 else ""
        return f"{ran.output}\n{ended}".strip() if ended else ran.output


ENVIRONMENT = Python
