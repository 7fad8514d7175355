"""Progress of `mrl evaluate` on standard error; standard output has the metrics as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from mrl.observability.loggers.base import Logger, Phase
from mrl.observability.loggers.console import PROGRESS_S


class ProgressLine(Logger):
    """Logger that shows only the progress inside a phase: in place on a terminal, else a line every `PROGRESS_S`.

    Args:
        console: Console to write to; None: standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._shows = False
        self._last_line = time.monotonic()

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Shows no metrics: `mrl evaluate` prints them."""

    def progress(self, text: str) -> None:
        """Shows the phase, prompts done, tokens per second and estimated time left."""
        if self._status is not None:
            self._status.update(Text(text))
            if not self._shows:
                self._status.start()
                self._shows = True
        elif time.monotonic() - self._last_line >= PROGRESS_S:
            self._last_line = time.monotonic()
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Removes the line."""
        if self._status is not None and self._shows:
            self._status.stop()
            self._shows = False
