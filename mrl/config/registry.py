"""Finds a plugin by name: the folder is the registry, and a path to code outside mrl works too (`user_code.py`).

Owns the lookup only. A family, algorithm, reward, engine or logger is added by adding one file to its folder; the file
defines the attribute that the folder's `base` names (for example `ALGORITHM`, `REWARD`).
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

    `base`, private modules and those that the folder's `__init__.py` lists in `NOT_PLUGINS` are left out.
    """
    return list(_names(folder))


@cache
def _names(folder: str) -> tuple[str, ...]:
    """Read once: a checkpoint of a large model asks for its family thousands of times."""
    package = importlib.import_module(f"mrl.{folder}")
    others = {"base", *getattr(package, "NOT_PLUGINS", ())}
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in found if name not in others and not name.startswith("_")))


_REQUIRED = object()


def find(folder: str, name: str, attribute: str, default: Any = _REQUIRED) -> Any:
    """The attribute of plugin `name` in `mrl/<folder>`, or what a path to code of a user's own names.

    Raises:
        UserError: There is no such plugin, or the path does not import; the nearest name is offered.
    """
    if user_code.is_own(name):
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
        raise UserError(f"{folder}: '{name}' is no plugin: mrl/{folder}/{name}.py defines no {attribute}.")
    return getattr(module, attribute, default)
