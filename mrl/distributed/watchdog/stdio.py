"""What a process prints goes nowhere once nobody can read it: a closed pipe or terminal ends no run.

Owns stdout and stderr of a process of mrl: `| head`, a log viewer that dies, a terminal that is closed. It imports
nothing that takes time.
"""

import errno
import io
import os
import sys

GONE = (errno.EPIPE, errno.EIO)
"""The reader of a pipe has ended; the terminal is closed."""


class Stream(io.TextIOWrapper):
    """Writes to a file descriptor, as text, while somebody reads it; a character that its encoding lacks is escaped."""

    def __init__(self, number: int, like: io.TextIOWrapper) -> None:
        """Of the descriptor `number`, which stays open; encoding and buffering are those of `like`."""
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
        """As any stream does; what cannot be written any more counts as written."""
        try:
            return super().write(text)
        except OSError as error:
            self._go_on_unseen(error)
            return len(text)

    def flush(self) -> None:
        """As any stream does; what cannot be written any more counts as written."""
        try:
            super().flush()
        except OSError as error:
            self._go_on_unseen(error)

    def _go_on_unseen(self, error: OSError) -> None:
        """From here on the descriptor is that of nothing, for what other code writes to it, too."""
        if error.errno not in GONE:
            raise error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._number)
        os.close(nothing)


def outlive_readers() -> None:
    """Makes stdout and stderr of this process ones that nobody has to read. Where they are replaced it does nothing."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # a test's, or there is none
        if not isinstance(stream, Stream):
            stream.flush()
            lasting = Stream(number, stream)
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)
