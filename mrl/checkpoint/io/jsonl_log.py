"""JSONL logs that survive crashes: one object per line, appended atomically, truncated on resume.

`StepFile` has one line per phase and step; later values are merged into the last line. Floats are written in the
shortest form that round-trips; NaN and infinities, which JSON lacks, as the strings "NaN", "Infinity" and "-Infinity",
which `float()` parses.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.checkpoint.io.atomic_files import replace_file, write_at
from mrl.errors import UserError

Row = dict[str, Any]

MAX_NAMED = 10
"""Invalid lines that an error message lists; the others are counted."""


class StepFile:
    """Appends rows {"step", "phase", **values}; each row is one write to the operating system."""

    def __init__(self, path: Path) -> None:
        """Opens the file for appending; call `truncate_rows` before."""
        self._path = path
        self._last: Row = {}
        self._last_offset = 0
        for offset, row in _rows(path):
            self._last, self._last_offset = row, offset
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def put(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds values to the row of (phase, step), which is the last row or a new one.

        Raises:
            RuntimeError: The log already has a later step of the phase.
            OSError: The disk refuses; the file is unchanged.
        """
        same = self._last.get("phase") == phase
        if same and self._last["step"] > step:
            raise RuntimeError(f"{self._path.name}: {phase} step {step} came after step {self._last['step']}.")
        if same and self._last["step"] == step:
            row, offset, before = {**self._last, **values}, self._last_offset, encode(self._last)
        else:
            row, offset, before = {"step": step, "phase": phase, **values}, os.fstat(self._fd).st_size, b""
        line = encode(row)
        try:
            write_at(self._fd, line, offset, self._path)
        except OSError:
            with contextlib.suppress(OSError):  # restores the old row, whose space is allocated
                os.pwrite(self._fd, before, offset)
                os.ftruncate(self._fd, offset + len(before))
            raise
        os.ftruncate(self._fd, offset + len(line))
        self._last, self._last_offset = row, offset

    def sync(self) -> None:
        """Fsyncs the rows."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def truncate_rows(path: Path, keep: Callable[[Row], bool], *, by_step: bool = True) -> None:
    """Keeps the rows for which `keep` is true and drops an unfinished last line; atomic.

    Raises:
        UserError: The file cannot be read, or a line is not a JSON object or lacks its step or phase.
    """
    if not path.exists():
        return
    kept = [encode(row) for _, row in _rows(path, by_step=by_step) if keep(row)]
    replace_file(path, b"".join(kept))


def read_rows(path: Path, *, by_step: bool = True) -> list[Row]:
    """Returns the complete rows of a file, [] where it does not exist; an unfinished last line is left out.

    Args:
        path: JSON lines.
        by_step: Every row must have a "step" and a "phase".

    Raises:
        UserError: The file cannot be read, or a line is not a JSON object or lacks its step or phase.
    """
    return [row for _, row in _rows(path, by_step=by_step)]


def encode(row: Mapping[str, Any]) -> bytes:
    """Returns a row as one line of valid JSON in UTF-8."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # a mapping that is not a dict, or a non-finite number
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def number(value: Any) -> float | None:
    """Parses a metric's value as written by `encode`; None if it is not a number."""
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    return float(value) if isinstance(value, int | float) else None


def _rows(path: Path, *, by_step: bool = True) -> Iterator[tuple[int, Row]]:
    """Yields (offset, row) of each complete line."""
    if not path.exists():
        return
    offset = 0
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be read: {error.strerror}. Expected a file of JSON lines that mrl wrote: restore it, or "
            "move it away."
        ) from error
    with stream:
        bad: list[str] = []
        for index, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            row, problem = _parse(line, by_step=by_step)
            if problem:
                bad.append(f"line {index} {problem}")
            elif not bad:
                yield offset, row
            offset += len(line)
    if bad:
        more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise UserError(
            f"'{path}', {'; '.join(bad[:MAX_NAMED])}{more}. Restore the file or remove "
            f"{'that line' if len(bad) == 1 else 'those lines'}."
        )


def _parse(line: bytes, *, by_step: bool) -> tuple[Row, str]:
    """Parses a line; returns ({}, problem) if it is not valid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return {}, "is not a JSON object"
    if by_step and not _has_step(row):
        return {}, 'lacks a "step" (0, 1, ...) or a "phase" (text)'
    return row, ""


def _has_step(row: Row) -> bool:
    step, phase = row.get("step"), row.get("phase")
    return type(step) is int and step >= 0 and isinstance(phase, str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
