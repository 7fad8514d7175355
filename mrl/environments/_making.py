"""From a name in the config to an object for an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mrl.environments.base import Environment
from mrl.errors import UserError
from mrl.schema import registry


def maker(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Makes one object for each episode.

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
        made = found(**kwargs)
        if not isinstance(made, Environment):
            raise UserError(f"environment '{name}' makes a {type(made).__name__}, expected an Environment.")
        return made

    return make
