"""Finds a plugin by name: the folder is the registry. A path to user code works too (`user_code.py`).

To add a model family, algorithm, environment, reward, engine or logger, add one file to its folder; the file defines
the attribute that the folder's `base` names (for example `ALGORITHM`, `REWARD`).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from mrl.config import user_code
from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError


def names(folder: str) -> list[str]:
    """Returns the plugins in `mrl/<folder>`, sorted.

    Excludes `base`, private modules and those in `NOT_PLUGINS` of the folder's `__init__.py`.
    """
    return list(_names(folder))


@cache
def _names(folder: str) -> tuple[str, ...]:
    """Returns the names, cached: reading a checkpoint of a large model looks its family up thousands of times."""
    package = importlib.import_module(f"mrl.{folder}")
    others = {"base", *getattr(package, "NOT_PLUGINS", ())}
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in found if name not in others and not name.startswith("_")))


_REQUIRED = object()


def find(folder: str, name: str, attribute: str, default: Any = _REQUIRED) -> Any:
    """Returns the attribute of plugin `name` in `mrl/<folder>`, or the object that a path to user code names.

    Raises:
        UserError: There is no such plugin (the message suggests the nearest name), or the path cannot be imported.
    """
    if user_code.is_user_code(name):
        try:
            return user_code.load(name)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error
    known = names(folder)
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(
            f"{folder}: there is no '{name}'.{hint} Known: {', '.join(known)}, or a path {user_code.FORMS}."
        )
    module = importlib.import_module(f"mrl.{folder}.{name}")
    if not hasattr(module, attribute) and default is _REQUIRED:
        raise UserError(f"{folder}: '{name}' is not a plugin: {module.__file__} defines no {attribute}.")
    return getattr(module, attribute, default)


def check_subclass(key: str, found: Any, base: type) -> None:
    """Checks that user code is a subclass of mrl's base class and defines all of its abstract methods.

    Args:
        key: Config key and value, for the message, such as "algorithm.name='rewards.py:Mine'".
        found: Object that the config names.
        base: Base class, which `mrl` exports.

    Raises:
        UserError: It is something else, or lacks methods.
    """
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key} is {found!r}, expected a subclass of {base.__module__}.{base.__qualname__}.")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise UserError(
            f"{key} does not define {', '.join(missing)}, which {base.__module__}.{base.__qualname__} requires. Add it."
        )
