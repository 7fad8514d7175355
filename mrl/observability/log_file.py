"""run.log of a run folder: text lines of every rank with their time, warnings and tracebacks among them.

Every rank appends to the same file (O_APPEND), one write per message, so that lines of ranks do not mix on a local file
system. The file is for people; an error while writing it is ignored and never ends a run.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.distributed.watchdog import abort
from mrl.errors import UserError, printable


def append_lines(path: Path, rank: int, text: str) -> None:
    """Appends each line of a message with the time and the rank; control characters become escapes."""
    head = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {rank}: "
    content = "".join(f"{head}{printable(line)}\n" for line in text.splitlines())
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, content.encode(errors="backslashreplace"))
        finally:
            os.close(descriptor)


@contextmanager
def record_process(path: Path, rank: int) -> Iterator[None]:
    """Appends this process's warnings, log records from WARNING on, fatal messages, and an error that leaves the block.

    They are also printed as before. An error that all ranks raise is written by rank 0 only.
    """

    def write(text: str) -> None:
        append_lines(path, rank, text)

    show, handler = warnings.showwarning, _Handler(write)

    def show_and_write(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any, **kwargs: Any
    ) -> None:
        show(message, category, filename, lineno, *args, **kwargs)
        write(f"{category.__name__}: {message} ({filename}:{lineno})")

    warnings.showwarning = show_and_write
    logging.getLogger().addHandler(handler)
    abort.on_message = write
    try:
        yield
    except BaseException as error:
        if rank == 0 or not (isinstance(error, UserError) and error.on_all_ranks):
            write(_describe(error))
        raise
    finally:
        abort.on_message = None
        logging.getLogger().removeHandler(handler)
        if warnings.showwarning is show_and_write:
            warnings.showwarning = show


def _describe(error: BaseException) -> str:
    """Returns the message of a UserError, the name of a signal's exception, or the traceback of another error."""
    if isinstance(error, UserError):
        return f"error: {error}"
    if not isinstance(error, Exception):
        return f"ended by {type(error).__name__}"
    return "".join(traceback.format_exception(error))


class _Handler(logging.Handler):
    """Handler of the root logger that passes formatted records to a function."""

    def __init__(self, write: Any) -> None:
        super().__init__(logging.WARNING)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record; prints it too if no other handler does, as `logging` does without handlers."""
        try:
            self._write(f"{record.levelname} {record.name}: {self.format(record)}")
        except Exception:  # noqa: BLE001 -- a record that cannot be formatted is reported as `logging` does
            self.handleError(record)
        if logging.lastResort is not None and not self._has_other_handler(record.name):
            logging.lastResort.handle(record)

    def _has_other_handler(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False
