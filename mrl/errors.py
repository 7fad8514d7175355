"""The one exception that a user can mend.

Owns `UserError`, how another library's error is quoted in one, how an extra is installed, and how foreign text is
written so that it cannot steer a terminal. The command line prints a UserError's message without a traceback and exits
with status 2; every other exception is a defect or a broken cluster and keeps its traceback.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEPT = "\n\t"
"""Control characters that messages hold on purpose."""


class UserError(ValueError):
    """A mistake in config, data or files.

    The message says what came, what was expected, which key, file or tensor, and what to do. Whatever it quotes, it is
    `printable`.

    Attributes:
        everywhere: True where every rank of the job raises this same error, so that one rank prints it.
        at: What the job was doing, "step 12, reward"; "" where no step had begun.
    """

    everywhere: bool = False
    at: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ClusterError(RuntimeError):
    """Trouble between hosts that no change of the config mends: one message, without a traceback, and status 70."""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Error numbers of a full, read-only or broken disk, which a person must fix."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raises a UserError in place of an error whose cause is a full, read-only or broken disk."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in DISK_ERRORS):
            cause = cause.__cause__
        if not isinstance(cause, OSError):
            raise
        file = f"'{cause.filename}'" if cause.filename is not None else "a file"
        raise UserError(
            f"{file} cannot be written: {cause.strerror}. Free space or make the disk writable, then start the same "
            "command again: it continues from the last complete checkpoint."
        ) from error


def to_install(extra: str) -> str:
    """The command that installs what an extra of setup.py names: mrl itself is on no package index."""
    return f'pip install -e ".[{extra}]" in the checkout of mrl'


def printable(text: str) -> str:
    r"""The text with control characters, and half surrogate pairs, as escapes: ESC becomes \x1b. Line ends stay."""
    return text if text.isprintable() else "".join(c if c in KEPT else escaped(c) for c in text)


def escaped(character: str) -> str:
    """The character, or its escape where it is not printable."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, the host or a GPU had no memory left; torch says so in three ways."""
    said = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in said
        or "Storage size calculation overflowed" in said
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def shown(value: Any) -> str:
    """A value of a user's for a message, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**60:
        return f"a number of more than {len(hex(value)) - 3} hexadecimal digits"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
