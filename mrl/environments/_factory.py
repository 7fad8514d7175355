"""From a name in the config to an object for an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mrl.config import registry
from mrl.environments._adapters import adapted
from mrl.environments.base import Environment
from mrl.errors import UserError


def maker(name: str, kwargs: Mapping[str, Any]) -> tuple[Callable[[], Environment], bool]:
    """What makes one object for each episode, and whether that needs the network.

    Args:
        name: Of a file in this folder, or a path to code of a user's own.
        kwargs: For its constructor.

    Raises:
        UserError: There is no such environment, or it does not take these arguments.
    """
    found = registry.find("environments", name, "ENVIRONMENT")
    if not callable(found):
        raise UserError(f"environment '{name}' is a {type(found).__name__}, expected a class.")
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise UserError(
            f"environment '{name}' cannot be made: {error}. It takes {inspect.signature(found)}; the config's kwargs "
            f"are {dict(kwargs)}."
        ) from error

    def make() -> Environment:
        return adapted(found(**kwargs), name)

    return make, bool(getattr(found, "network", False))
