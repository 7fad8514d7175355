"""YAML as a user wrote it: read into nested dicts and lists, or refused in a line.

Owns reading and what goes wrong in it. What the values mean is known to whoever reads.
"""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.errors import UserError

UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, OSError, RecursionError)
"""What PyYAML and OmegaConf raise at a text or a value: some of it by accident, deep inside them."""

MAX_BYTES = 10 << 20
MAX_DEPTH = 40
"""Mappings and lists inside each other; a config needs six."""
MAX_SHOWN = 300
"""Characters of another library's message that are quoted."""


def read_yaml(file: Path, what: str) -> Any:
    """The content of a YAML file as nested dicts and lists, references between keys not resolved.

    Args:
        file: To be read.
        what: It is, for messages: "config file".

    Raises:
        UserError: It is not there, or not readable YAML.
    """
    try:
        if os.path.getsize(file) > MAX_BYTES:
            raise UserError(f"{what} '{file}' has more than {MAX_BYTES} bytes: it is another file.")
        check_depth(file.read_bytes())
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{what} '{file}' is not readable YAML: {reason(error)}.") from error


def check_depth(text: str | bytes) -> None:
    """Raises RecursionError where libyaml, which calls itself for each depth, would overrun its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecursionError


def reason(error: Exception) -> str:
    """What one of UNREADABLE says, in a line."""
    if isinstance(error, RecursionError):
        return "its lists and mappings are too deep in each other"
    said = " ".join(str(error).split()).partition(" full_key:")[0].rstrip(".")
    return f"{said[:MAX_SHOWN]}..." if len(said) > MAX_SHOWN else said
