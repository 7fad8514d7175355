"""User code: the meaning of paths such as `rewards.py:score` or `package.module:Class`, and their import.

Loading a config makes such a path absolute; it is searched in the config's folder, then in the working folder. So
ranks, worker processes and a resumed run find the same file, wherever they are started. Callers check the type of the
object that a path names (`registry.py`).

An object that a script passes to `mrl.train` gets its path if it has one (`path_of`), else a name such as
`python-object:__main__.score` (`object_name`), which only this process can load, inside `named_objects`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.config.did_you_mean import did_you_mean, did_you_mean_path
from mrl.errors import UserError, first_line

FORMS = "'package.module:object' or 'path/to/file.py:object'"
"""Accepted forms of a path to user code, for messages."""


OBJECT_PREFIX = "python-object:"
"""Prefix of the names of objects without a path; no module can have this name."""

_PACKAGE = Path(__file__).resolve().parents[1]
_objects: dict[str, Any] = {}


def is_user_code(name: str) -> bool:
    """Returns whether a name is a path to user code or a Python object, and not the name of something in mrl."""
    return "." in name or ":" in name


def is_code_not_column(name: str) -> bool:
    """Returns whether a name that may be a column, such as `extra.level`, is a path to user code: it has a colon."""
    return ":" in name or name.endswith(".py")


def is_object(name: str) -> bool:
    """Returns whether a name is that of an object which a script passed to mrl."""
    return name.startswith(OBJECT_PREFIX)


def target_of(name: str) -> str:
    """Returns the last part of a name: `rewards.py:score` and `python-object:__main__.score` -> `score`."""
    return name.replace(":", ".").rpartition(".")[2].partition("#")[0]


@contextmanager
def named_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Lets `load` return these objects by their names inside the block."""
    before = dict(_objects)
    _objects.update(objects)
    try:
        yield
    finally:
        _objects.clear()
        _objects.update(before)


def object_name(thing: object, taken: Mapping[str, Any]) -> str:
    """Returns a name for an object without a path, such as `python-object:__main__.score`.

    Args:
        thing: Function, class or instance.
        taken: Objects that have a name; a name that another object has gets the suffix `#2`, `#3` and so on.
    """
    named = thing.func if isinstance(thing, functools.partial) else thing
    named = named if hasattr(named, "__qualname__") else type(named)
    last = named.__qualname__.rpartition(".")[2].strip("<>")  # of a lambda: lambda
    base = f"{OBJECT_PREFIX}{named.__module__}.{last}"
    candidates = (base if count == 1 else f"{base}#{count}" for count in range(1, len(taken) + 2))
    return next(name for name in candidates if name not in taken or taken[name] is thing)


def path_of(thing: object) -> str | None:
    """Returns the path by which every process imports a function or class; None if there is none.

    Objects of the script itself (`__main__`) have none, because importing a script would run it again. Nor have
    lambdas, instances, and functions and classes defined inside others.
    """
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    target = getattr(thing, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, target, None) is not thing:
        return None
    file = getattr(module, "__file__", None) or ""
    if file.endswith(".py") and _root_and_name(Path(file).resolve())[1] == module.__name__:
        return f"{Path(file).resolve()}:{target}"
    found = importlib.machinery.PathFinder.find_spec(module.__name__.partition(".")[0])
    return None if found is None else f"{module.__name__}:{target}"


def make_absolute(name: str, folders: Sequence[Path]) -> str:
    """Returns a path with its file made absolute: `rewards.py:score` -> `/home/me/rewards.py:score`.

    A module in one of the folders becomes its file; an installed one, or one on PYTHONPATH, stays unchanged.

    Args:
        name: Path to user code; the name of something in mrl is returned unchanged.
        folders: Folders to search, in this order.

    Raises:
        UserError: The file does not exist, or the path names no object in it.
    """
    if not is_user_code(name) or is_object(name):
        return name
    place, target = _parts(name)
    if place.endswith(".py"):
        wanted = Path(place)
        candidates = [folder / wanted for folder in folders]  # an absolute path stays absolute
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
    """Returns the path without the folder of its file: `/home/me/rewards.py:score` -> `rewards:score`."""
    place, colon, target = name.rpartition(":")
    return f"{Path(place).stem}:{target}" if colon and place.endswith(".py") else name


def load(name: str) -> Any:
    """Imports the module of a path and returns the object that the path names.

    Raises:
        UserError: The module cannot be imported, or has no such object.
    """
    if is_object(name):
        if name not in _objects:
            raise UserError(
                f"'{name}' is a Python object that a script passed to mrl, and this process does not have it. Run that "
                f"script again, or move the object into a file and name it as 'path/to/file.py:{target_of(name)}'."
            )
        return _objects[name]
    place, target = _parts(name)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except SystemExit as error:
        raise UserError(f"'{name}' does not import: it raises SystemExit: {error}.") from error
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"'{name}' does not import: {_import_error(error, place)}") from error
    if not hasattr(module, target):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise UserError(f"'{name}': '{place}' has no '{target}'.{did_you_mean(target, known)}")
    return getattr(module, target)


def _did_you_mean_module(name: str) -> str:
    """Returns a suggestion for a missing top-level module, from the modules in the working folder."""
    here = [path.stem for path in Path.cwd().glob("*.py")]
    here += [path.parent.name for path in Path.cwd().glob("*/__init__.py")]
    return did_you_mean(name, here)


def _parts(name: str) -> tuple[str, str]:
    """Splits a path into file or module, and the name of the object."""
    if name.endswith(".py"):
        raise UserError(f"'{name}' names a file but no object in it: write '{name}:object'.")
    place, _, target = name.rpartition(":" if ":" in name else ".")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not named or not target:
        raise UserError(f"'{name}' is not a path to code: write {FORMS}.")
    return place, target


def _from_file(file: Path) -> ModuleType:
    """Imports a file, as a part of its package if its folder has an `__init__.py`.

    Its folder and the working folder are appended to `sys.path`, after everything that is installed.
    """
    if not file.is_file():
        raise ImportError(f"there is no file '{file}'")
    file = file.resolve()
    root, name = _root_and_name(file)
    for folder in (str(root), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()
    if "." in name or _finds(name, file):
        return importlib.import_module(name)
    return _alone(file)


def _root_and_name(file: Path) -> tuple[Path, str]:
    """Returns the folder from which a file is imported, and the dotted name of its module."""
    root, parts = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts)


def _finds(name: str, file: Path) -> bool:
    """Returns whether importing this top-level name gives this file, and not another module of the same name."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) == str(file)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin == str(file)


def _alone(file: Path) -> ModuleType:
    """Imports a file under a unique name, because another module already has its name."""
    name = f"{file.stem}_{blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{file}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_error(error: Exception, place: str) -> str:
    """Returns the error with the line of the user's code that raised it."""
    if not isinstance(error, ImportError):
        return f"{describe_error(error)}."
    said = first_line(error)
    if isinstance(error, ModuleNotFoundError) and error.name and place.partition(".")[0] == error.name:
        hint = _did_you_mean_module(error.name)
        return f"{said}.{hint} Write it as {FORMS}, in the config's folder, the working folder or on PYTHONPATH."
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        said += f"; install {package} in mrl's environment, or take the import out"
    return f"{said}{_origin(error)}."


def describe_error(error: Exception) -> str:
    """Returns the class, message and line of an exception that a user's object raised, without a final full stop."""
    return f"{type(error).__name__}: {first_line(error)}{_origin(error)}"


def _origin(error: Exception) -> str:
    """Returns the last line of code outside mrl that the exception went through, as " (file, line 3)"; "" without."""
    inside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""
