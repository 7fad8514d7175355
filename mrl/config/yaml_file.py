"""Reads YAML files into nested dicts and lists, with one-line error messages."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrl.errors import UserError

UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, OSError, RecursionError)
"""Exceptions that PyYAML and OmegaConf raise for unreadable values, some of them unintentionally."""

MAX_BYTES = 10 << 20
MAX_DEPTH = 40
"""Nesting depth of mappings and lists; a config needs six."""
JOINED = re.compile(r"(?=.*\d_)(?![-+]?\d{1,3}(_\d{3})+(\.\d*)?$)[-+]?[\d.][\d_]*(?:(?<!\.)\.[\d_]*)?(?<!\.)")
"""Digits joined by underscores that do not group thousands; with two decimal points YAML reads a string."""
BASE_60 = re.compile(r"[-+]?(?:[1-9][\d_]*(?::[0-5]?\d)+|\d[\d_]*(?::[0-5]?\d)+\.[\d_]*)")
"""Numbers with colons, such as 3:1 or 12:30, which YAML 1.1 reads in base 60."""
MAX_SHOWN = 300
"""Characters of another library's message that are quoted."""


def read_yaml(file: Path, what: str) -> Any:
    """Returns the content of a YAML file as nested dicts and lists; references between keys are not resolved.

    Args:
        file: Path of the file.
        what: Description of the file for messages, such as "config file".

    Raises:
        UserError: The file is missing or not valid YAML.
    """
    content = b""
    try:
        if os.path.getsize(file) > MAX_BYTES:
            raise UserError(f"{what} '{file}' has more than {MAX_BYTES} bytes: it cannot be a {what}.")
        content = file.read_bytes()
        content.decode("utf-8")
        _check_file(content, f"{what} '{file}'")
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} '{file}' is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}. "
            "Save it as UTF-8."
        ) from error
    except UNREADABLE as error:
        tab = _tab_before(error, content)
        raise UserError(f"{what} '{file}' is not readable YAML: {tab or reason(error)}.") from error


def _check_file(content: bytes, what: str) -> None:
    """Refuses a file that YAML would misread; see `check_events`."""
    try:
        check_events(content)
    except UserError as error:
        raise UserError(f"{what}: {error}.") from error


def _tab_before(error: Exception, content: bytes) -> str | None:
    """Returns an explanation if a tab in the indentation caused the error, else None."""
    mark = getattr(error, "problem_mark", None)
    lines = content.decode("utf-8").splitlines()
    if mark is None or mark.line >= len(lines) or not re.match(r" *\t", lines[mark.line]):
        return None
    return f"line {mark.line + 1} is indented with a tab; YAML takes spaces only"


def check_events(text: str | bytes) -> None:
    """Refuses YAML that would be misread or that crashes the parser.

    Raises:
        RecursionError: The nesting is so deep that libyaml would overflow its stack.
        UserError: Numbers joined by an underscore, such as the bounds 0.5_2, would be read as the one number 0.52, or
            numbers joined by a colon, such as the weights 3:1, as the number 3 x 60 + 1.
    """
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and JOINED.fullmatch(event.value):
            raise UserError(f"YAML reads {event.value} as one number. Write it with quotes or with two points: 0.5_2.0")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and BASE_60.fullmatch(event.value):
            raise UserError(
                f"YAML reads {event.value} as the number {yaml.safe_load(event.value)} (base 60). Write "
                f'[{event.value.replace(":", ",")}] for a list of numbers, or quotes around a text: "{event.value}"'
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecursionError


def reason(error: Exception) -> str:
    """Returns the message of one of UNREADABLE as one line."""
    if isinstance(error, RecursionError):
        return "its lists and mappings are nested too deep"
    said = " ".join(str(error).split()).partition(" full_key:")[0].rstrip(".")
    return f"{said[:MAX_SHOWN]}..." if len(said) > MAX_SHOWN else said
