"""Python as a tool: the model writes a program, which runs in a sandbox, and reads what it printed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mrl.distributed.worker_processes.folders import owned_folder, remove
from mrl.distributed.worker_processes.sandbox import Bounds, run_python
from mrl.environments.base import Observation, Tool
from mrl.environments.toolbox import ToolEnvironment
from mrl.errors import UserError


@cache
def _missing() -> tuple[str, ...]:
    """What the sandbox lacks on this machine; asked once in a worker."""
    with owned_folder("probe") as folder:
        return run_python("", folder, Bounds(time_s=60.0)).missing


class Python(ToolEnvironment):
    """The question is the row's; the reward is given by the config's reward functions.

    An episode has one folder, in which its programs find what earlier ones wrote; variables do not last.
    """

    def __init__(
        self, time_limit_s: float = 5.0, memory_limit_mb: int = 512, max_output_bytes: int = 10_000, strict: bool = True
    ) -> None:
        """Sets the bounds of one program.

        Args:
            time_limit_s: For one program, s; below the limit for an answer of the environment.
            memory_limit_mb: MiB.
            max_output_bytes: That it may print.
            strict: Where the machine lacks a part of the sandbox no program is run; otherwise they run without it.
        """
        if not (time_limit_s > 0 and memory_limit_mb >= 64 and max_output_bytes > 0):
            raise UserError(
                f"python: time_limit_s={time_limit_s}, memory_limit_mb={memory_limit_mb}, max_output_bytes="
                f"{max_output_bytes}; expected numbers above 0, and 64 MiB at least."
            )
        self._bounds = Bounds(time_limit_s, memory_limit_mb, max_output_bytes)
        self._folder = ""
        if strict and _missing():
            raise UserError(
                f"python: the sandbox does not hold on this machine ({'; '.join(_missing())}); strict=false runs "
                "programs without what is missing."
            )

    @property
    def tools(self) -> Sequence[Tool]:
        """`python`."""
        return (self.python,)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Makes the folder."""
        self._folder = tempfile.mkdtemp(prefix="episode-")
        return Observation()

    def close(self) -> None:
        """Removes the folder."""
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
