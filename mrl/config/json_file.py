"""Reads JSON files, with one-line error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.errors import UserError, first_line


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        UserError: The file cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{file}' cannot be read as JSON: {first_line(error)}.") from error
    if not isinstance(content, dict):
        raise UserError(f"'{file}' is a JSON {type(content).__name__}, expected an object.")
    return content
