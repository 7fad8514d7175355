"""stdout and stderr that survive the loss of their reader: a closed pipe or terminal does not end a run.

Cases are `| head`, a log viewer that dies, a terminal that is closed. It imports only modules that load fast.
"""

import errno
import io
import os
import sys

READER_LOST = (errno.EPIPE, errno.EIO)
"""Errors of a write after the reader of a pipe has ended, or the terminal was closed."""


class ResilientStream(io.TextIOWrapper):
    """Text stream on a file descriptor that discards output once the reader is gone.

    Characters that the encoding lacks are escaped.
    """

    def __init__(self, number: int, like: io.TextIOWrapper) -> None:
        """Wraps the descriptor `number`, which stays open, with the encoding and buffering of `like`."""
        file = io.FileIO(number, "w", closefd=False)
        super().__init__(
            file if like.write_through else io.BufferedWriter(file),
            like.encoding,
            "backslashreplace",
            line_buffering=like.line_buffering,
            write_through=like.write_through,
        )
        self._number = number

    def write(self, text: str) -> int:
        """Writes text and returns its length, also when the reader is gone."""
        try:
            return super().write(text)
        except OSError as error:
            self._discard_output(error)
            return len(text)

    def flush(self) -> None:
        """Flushes, and discards what cannot be written because the reader is gone."""
        try:
            super().flush()
        except OSError as error:
            self._discard_output(error)

    def _discard_output(self, error: OSError) -> None:
        """Redirects the descriptor to /dev/null, also for other code that writes to it."""
        if error.errno not in READER_LOST:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._number)
        os.close(null)


def tolerate_closed_pipes() -> None:
    """Replaces stdout and stderr by `ResilientStream`s, unless other code has already replaced them."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # replaced, as pytest does, or None
        if not isinstance(stream, ResilientStream):
            stream.flush()
            replacement = ResilientStream(number, stream)
            setattr(sys, name, replacement)
            setattr(sys, f"__{name}__", replacement)
