"""The values that a field of the config can name: choices and plugins; for shell completion and the JSON Schema."""

from __future__ import annotations

from typing import Any, Literal, Union, get_args, get_origin

from mrl.config import registry

PLUGINS = {
    "rollout.name": "engines",
    "algorithm.name": "algorithms",
    "reward.functions[*].name": "rewards",
    "observe.loggers[*].name": "observability.loggers",
    "rollout.agent.environment": "environments",
}
"""Keys whose values are names of plugins, or paths to user code -> folder of the plugins."""


def choices(kind: Any, key: str) -> list[str]:
    """Returns the values that a field names: its choices, true and false, or the plugins; [] for free values.

    Args:
        kind: Type of the field.
        key: Dotted key of the field, with `[*]` for each entry of a list.
    """
    if key in PLUGINS:
        return registry.names(PLUGINS[key])
    if get_origin(kind) is Union:
        return choices(get_args(kind)[0], key)
    if get_origin(kind) is Literal:
        return [str(each) for each in get_args(kind)]
    return ["true", "false"] if kind is bool else []
