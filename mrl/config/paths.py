"""Path fields of the config, and the expansion of `~` and `$VARIABLES` in them.

`config.py` annotates path fields with `FilePath`, `OutputPath` and `TokenizerPath`; `values.py` calls `expand_path` on
their values. Whether a path exists is checked where it is used.
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
"""Prefix of a character tokenizer, followed by its characters; not a path."""

BYTES = "bytes:"
"""Name of the tokenizer with one token per byte of UTF-8; not a path."""

MAX_LENGTH, MAX_NAME_BYTES = 4096, 255
"""Linux's limits on the length of a path (characters) and of each name in it (bytes)."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class IsPath:
    """Annotation of a config string that is a path.

    Attributes:
        but: Prefixes of strings that are not paths.
        is_written: True for a folder that a run writes, which an address such as `s3://bucket/run` cannot be.
    """

    but: tuple[str, ...] = ()
    is_written: bool = False


FilePath = Annotated[str, IsPath()]
OutputPath = Annotated[str, IsPath(is_written=True)]
TokenizerPath = Annotated[str, IsPath(but=(CHAR_PREFIX, BYTES))]


@cache
def path_keys(schema: type, prefix: str = "") -> dict[str, IsPath]:
    """Returns the dotted keys of all path fields and lists of paths, without list indices."""
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
    """Returns the `IsPath` annotation of a type, also inside `Optional` and `list`."""
    own = [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, IsPath)]
    inner = (_mark(argument) for argument in get_args(kind))
    return own[0] if own else next((found for found in inner if found), None)


def expand_path(text: str, mark: IsPath | None = None) -> str:
    """Returns a path with its home folder and variables expanded; references to other keys (`${run.seed}`) stay.

    Raises:
        UserError: The path is empty or too long, a variable is not set, a home folder does not exist, a folder is
            called `~`, or a folder that a run writes is an address of object storage.
    """
    if mark is not None and text.startswith(mark.but):
        return text
    if not text.strip():
        raise UserError("the path is empty; set one, or remove the key")
    found = os.path.expandvars(text)
    if mark is not None and mark.is_written and (scheme := _SCHEME.match(found)):
        raise UserError(
            f"the path '{text}' is an address ({scheme[0]}...), expected a folder of a file system. A checkpoint is "
            "complete once its folder is renamed, and its files are synced before; object storage has neither an "
            "atomic rename of a folder nor fsync, so a killed run could resume from half a checkpoint. Give a local or "
            "shared folder, and copy complete checkpoints (`rclone copy FOLDER/checkpoints/step-... REMOTE`)"
        )
    unknown = _VARIABLE.search(found)
    if unknown:
        raise UserError(f"the path '{text}' uses the variable {unknown[0]}, which is not set")
    found = os.path.expanduser(found)
    parts = PurePath(found).parts
    if found.startswith("~"):
        raise UserError(f"the path '{text}' names a home folder that does not exist; write the full path")
    if "~" in parts:
        raise UserError(f"the path '{text}' has a '~' in the middle, where it is not expanded; write the full path")
    if len(found) > MAX_LENGTH or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        raise UserError(f"the path '{text[:40]}...' has {len(found)} characters, more than a file system allows")
    return found
