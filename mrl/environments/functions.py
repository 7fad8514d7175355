"""Environment with a user's Python functions as tools; they need type hints and docstrings, but no class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config import user_code
from mrl.environments._schemas import tool_name
from mrl.environments.base import Observation, Tool
from mrl.environments.toolbox import ToolEnvironment
from mrl.errors import UserError


class Functions(ToolEnvironment):
    """Tool environment over a list of functions; the reward comes from the config's reward functions."""

    def __init__(self, tools: Sequence[str]) -> None:
        """Imports the functions.

        Args:
            tools: Paths of functions, "path/to/file.py:name" or "package.module:name".
        """
        if isinstance(tools, str) or not tools:
            raise UserError(f"functions: tools={tools!r}, expected a list of paths {user_code.FORMS}.")
        self._tools: list[Tool] = [user_code.load(name) for name in tools]
        for path, tool in zip(tools, self._tools, strict=True):
            if not callable(tool):
                raise UserError(f"functions: '{path}' is a {type(tool).__name__}, expected a function.")
        names = [tool_name(tool) for tool in self._tools]
        if len(set(names)) < len(names):
            raise UserError(f"functions: two tools have the same name: {', '.join(names)}.")

    @property
    def tools(self) -> Sequence[Tool]:
        """The functions of the config."""
        return self._tools

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Adds nothing to the prompt."""
        return Observation()


ENVIRONMENT = Functions
