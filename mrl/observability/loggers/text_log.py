"""Writes what the plain console shows into run.log of the run folder, also if the console is rich or off."""

from __future__ import annotations

import io

from rich.console import Console

from mrl.observability.log_file import append_lines
from mrl.observability.loggers.base import Logger, Opening
from mrl.observability.loggers.console import PlainConsole


class _Lines(io.StringIO):
    """Text stream that appends complete lines to run.log."""

    def __init__(self, opening: Opening) -> None:
        super().__init__()
        self._path, self._text = opening.run.log, ""

    def write(self, text: str) -> int:
        """Appends the lines that are complete, and keeps the rest."""
        complete, end, self._text = (self._text + text).rpartition("\n")
        if end:
            append_lines(self._path, 0, complete)
        return len(text)


def open_text_log(opening: Opening) -> Logger:
    """Returns the logger, which first writes a line that says where the run starts or resumes."""
    resumed = "new run" if opening.resume_step is None else f"resumed after step {opening.resume_step}"
    append_lines(opening.run.log, 0, f"--- {resumed} in {opening.run.root}")
    return PlainConsole(opening, Console(file=_Lines(opening), highlight=False, color_system=None))


LOGGER = open_text_log
