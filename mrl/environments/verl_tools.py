"""Environment with verl's tools, listed in the config or in verl's YAML file (`tool_config_path`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrl.config import user_code
from mrl.config.did_you_mean import did_you_mean_path
from mrl.environments._adapters import VerlTools
from mrl.errors import UserError


class _Schema(dict[str, Any]):
    """A schema whose keys are also attributes, as in verl's pydantic model: `tool_schema.function.name`."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError as error:
            raise AttributeError(name) from error
        return _Schema(value) if isinstance(value, dict) else value


def verl_tools(tools: Sequence[Mapping[str, Any]] = (), tool_config_path: str = "", reward: str = "none") -> VerlTools:
    """Makes the tools of one episode.

    Args:
        tools: Mappings with verl's keys "class_name" ("package.module.Class" or "path/to/file.py:Class"), "config" and
            "tool_schema".
        tool_config_path: Path of verl's YAML file, which has such a list under "tools"; "" for none.
        reward: Source of the reward, see `VerlTools`.

    Raises:
        UserError: No tool is listed, or the file cannot be read.
    """
    listed: list[Any] = list(tools)
    if tool_config_path:
        try:
            listed += yaml.safe_load(Path(tool_config_path).read_text(encoding="utf-8"))["tools"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            hint = did_you_mean_path(tool_config_path)
            raise UserError(f"verl_tools: cannot read 'tools' from {tool_config_path}: {error}.{hint}") from error
    if not listed or not all(isinstance(tool, Mapping) and "class_name" in tool for tool in listed):
        raise UserError("verl_tools: expected tools, each with 'class_name', 'config' and 'tool_schema'.")
    return VerlTools([_made(tool) for tool in listed], reward)


def _made(tool: Mapping[str, Any]) -> Any:
    kind = user_code.load(tool["class_name"])
    return kind(dict(tool.get("config") or {}), _Schema(tool["tool_schema"]) if tool.get("tool_schema") else None)


ENVIRONMENT = verl_tools
