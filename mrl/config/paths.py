"""Paths in a config: which fields are paths, and what `~` and `$VARIABLES` in them become.

Owns the marks `FilePath` and `TokenizerPath`, which `config.py` puts on fields, and `expanded`, which
`values.py` calls for every value of such a field. Whether there is anything at a path is asked where it is used.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, get_args, get_type_hints

from mrl.errors import UserError

CHAR_PREFIX = "char:"
"""Begins a tokenizer that is no folder: the characters themselves follow."""

MAX_LENGTH, MAX_NAME_BYTES = 4096, 255
"""Of a path and of each name in it; Linux takes no longer ones."""

_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class IsPath:
    """Marks a text of a config as a path.

    Attributes:
        but: A text that begins so is none.
    """

    but: str | None = None


FilePath = Annotated[str, IsPath()]
TokenizerPath = Annotated[str, IsPath(but=CHAR_PREFIX)]


@cache
def path_keys(schema: type, prefix: str = "") -> dict[str, IsPath]:
    """Every dotted key of a schema of dataclasses that is a path or a list of paths; indices of lists are left out."""
    found: dict[str, IsPath] = {}
    for name, kind in get_type_hints(schema, include_extras=True).items():
        mark = _mark(kind)
        if mark is not None:
            found[f"{prefix}{name}"] = mark
        for inner in (kind, *get_args(kind)):
            if isinstance(inner, type) and is_dataclass(inner):
                found |= path_keys(inner, f"{prefix}{name}.")
    return found


def _mark(kind: Any) -> IsPath | None:
    """The mark of a type, also inside `Optional` and `list`."""
    own = [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, IsPath)]
    inner = (_mark(argument) for argument in get_args(kind))
    return own[0] if own else next((found for found in inner if found), None)


def expanded(text: str, mark: IsPath | None = None) -> str:
    """A path with its home folder and variables written out; references to other keys (`${run.seed}`) stay.

    Raises:
        UserError: It is empty or too long, a variable is not set, there is no such home folder, or a folder of the
            path is called `~`.
    """
    if mark is not None and mark.but is not None and text.startswith(mark.but):
        return text
    if not text.strip():
        raise UserError("a path is empty; leave the key out, or give one")
    found = os.path.expandvars(text)
    unknown = _VARIABLE.search(found)
    if unknown:
        raise UserError(f"the path '{text}' names the variable {unknown[0]}, which is not set; set it, or write it out")
    found = os.path.expanduser(found)
    parts = PurePath(found).parts
    if found.startswith("~"):
        raise UserError(f"the path '{text}' names a home folder that is not there; write it out")
    if "~" in parts:
        raise UserError(f"the path '{text}' has '~' in its middle, where it is no home folder; write it out")
    if len(found) > MAX_LENGTH or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        raise UserError(f"the path '{text[:40]}...' has {len(found)} characters, more than a file system takes")
    return found
