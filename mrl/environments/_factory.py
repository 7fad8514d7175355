"""Construction of environments from their name in the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mrl.config import registry
from mrl.environments._adapters import adapt
from mrl.environments.base import Environment
from mrl.errors import UserError


def find_environment(name: str, kwargs: Mapping[str, Any]) -> tuple[Callable[[], Environment], bool]:
    """Returns a function that makes an environment for one episode, and whether the environment needs the network.

    Args:
        name: Name of a file in this folder, or path of a user's class.
        kwargs: Arguments of the constructor.

    Raises:
        UserError: The environment does not exist, or does not accept these arguments.
    """
    found = registry.find("environments", name, "ENVIRONMENT")
    if not callable(found):
        raise UserError(f"environment '{name}' is a {type(found).__name__}, expected a class.")
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise UserError(
            f"environment '{name}' cannot be made: {error}. Its parameters are {inspect.signature(found)}; the "
            f"config's kwargs are {dict(kwargs)}."
        ) from error

    def make() -> Environment:
        return adapt(found(**kwargs), name)

    return make, bool(getattr(found, "network", False))
