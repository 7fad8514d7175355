"""Code of a user's own: what a path such as `rewards.py:score` or `package.module:Class` means, and how it is imported.

Owns both. A path is looked for when a config is loaded, in the config's folder and then in the working folder, and
becomes absolute there: ranks, worker processes and a resumed run find the same file wherever they are started. What
such a path has to name is known to whoever asks for it, through `registry.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.config.did_you_mean import did_you_mean, did_you_mean_path
from mrl.errors import UserError, first_line

FORMS = "'package.module:object' or 'path/to/file.py:object'"
"""How code of a user's own is named, for messages."""


def is_own(name: str) -> bool:
    """Whether a name is a path to code of a user's own, and not the name of something in mrl."""
    return "." in name or ":" in name


def located(name: str, folders: Sequence[Path]) -> str:
    """A path with its file written out: `rewards.py:score` -> `/home/me/rewards.py:score`.

    A module that lies in one of the folders becomes its file; one that is installed, or on PYTHONPATH, stays as it is.

    Args:
        name: Of something in mrl, which stays as it is, or a path.
        folders: Where files and modules are looked for, in this order.

    Raises:
        UserError: The file that the path names does not exist, or the path names no object in it.
    """
    if not is_own(name):
        return name
    place, target = _parts(name)
    if place.endswith(".py"):
        wanted = Path(place)
        candidates = [folder / wanted for folder in folders]  # an absolute one stays what it is
        looked = dict.fromkeys(str(folder.resolve()) for folder in folders)
        missing = f"'{name}': there is no file '{wanted}' in {' or '.join(looked)}."
        missing += next(filter(None, map(did_you_mean_path, candidates)), "")
    else:
        inner = Path(*place.split("."))
        candidates = [folder / file for folder in folders for file in (inner.with_suffix(".py"), inner / "__init__.py")]
        missing = ""
        if inner.parts[:1] == ("mrl",):
            return name
    found = next((file for file in candidates if file.is_file()), None)
    if found is not None:
        return f"{found.resolve()}:{target}"
    if missing:
        raise UserError(missing)
    return name


def label(name: str) -> str:
    """The path without the folder of its file: `/home/me/rewards.py:score` -> `rewards:score`."""
    place, colon, target = name.rpartition(":")
    return f"{Path(place).stem}:{target}" if colon and place.endswith(".py") else name


def load(name: str) -> Any:
    """What a path names, its module imported.

    Raises:
        UserError: The module cannot be imported, or has no such object.
    """
    place, target = _parts(name)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except SystemExit as error:
        raise UserError(f"'{name}' does not import: it ends Python, SystemExit: {error}.") from error
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"'{name}' does not import: {_told(error, place)}") from error
    if not hasattr(module, target):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise UserError(f"'{name}': '{place}' has no '{target}'.{did_you_mean(target, known)}")
    return getattr(module, target)


def _did_you_mean_module(name: str) -> str:
    """Returns the question behind a sentence about a top-level module that is not found, from the working folder."""
    here = [path.stem for path in Path.cwd().glob("*.py")]
    here += [path.parent.name for path in Path.cwd().glob("*/__init__.py")]
    return did_you_mean(name, here)


def _parts(name: str) -> tuple[str, str]:
    """File or module, and the object in it."""
    if name.endswith(".py"):
        raise UserError(f"'{name}' names a file, and nothing in it: write '{name}:object'.")
    place, _, target = name.rpartition(":" if ":" in name else ".")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not named or not target:
        raise UserError(f"'{name}' is no path to code: write {FORMS}.")
    return place, target


def _from_file(file: Path) -> ModuleType:
    """The module of a file; what it imports is found beside it and in the working folder, after all that is installed.

    A file in a package (a folder with `__init__.py`) is imported as a part of it.
    """
    if not file.is_file():
        raise ImportError(f"there is no file '{file}'")
    file = file.resolve()
    root, parts = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    for folder in (str(root), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()
    name = ".".join(parts)
    if len(parts) > 1 or _finds(name, file):
        return importlib.import_module(name)
    return _alone(file)


def _finds(name: str, file: Path) -> bool:
    """Whether a top-level module of this name is this file, and not another of the same name."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) == str(file)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin == str(file)


def _alone(file: Path) -> ModuleType:
    """The module of a file whose name another module has, under a name that no other file has."""
    name = f"{file.stem}_{blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{file}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: Exception, place: str) -> str:
    """What was wrong, and in which line of the user's code."""
    said = first_line(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name and place.partition(".")[0] == error.name:
        hint = _did_you_mean_module(error.name)
        return f"{said}.{hint} Write it as {FORMS}, in the config's folder, the working folder or on PYTHONPATH."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    inside = [frame for frame in frames if frame.filename != __file__]
    return f"{said} ({inside[-1].filename}, line {inside[-1].lineno})." if inside else f"{said}."
