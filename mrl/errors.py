"""Errors that are shown to the user, and helpers that escape untrusted text in their messages.

The command line prints a `UserError` without a traceback and exits with status 2. Every other exception is a bug or a
cluster failure and keeps its traceback.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

KEPT = "\n\t"
"""Control characters that `printable` leaves in a message."""


class UserError(ValueError):
    """Error in the user's config, data or files.

    The message states the value found, the value expected, the key, file or tensor, and the fix. Quoted text is passed
    through `printable`.

    Attributes:
        on_all_ranks: True if every rank of the job raises this same error, so that only rank 0 prints it.
        at: Step and phase in which the error occurred, for example "step 12, reward"; "" outside a step.
    """

    on_all_ranks: bool = False
    at: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


MAX_MISTAKES = 20
"""Mistakes that one message lists."""


class MistakesError(UserError):
    """Several mistakes.

    Attributes:
        errors: Error of each mistake.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        more = len(errors) - MAX_MISTAKES
        lines = [*map(str, errors[:MAX_MISTAKES]), *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n- ".join([f"{len(errors)} mistakes:", *lines]))
        self.errors = tuple(errors)


class Mistakes:
    """Mistakes of a user that one error reports together."""

    def __init__(self) -> None:
        self._found: dict[str, UserError] = {}

    def add(self, error: UserError) -> None:
        """Adds a mistake, or several; the same message counts once."""
        for one in error.errors if isinstance(error, MistakesError) else [error]:
            self._found.setdefault(str(one), one)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Adds a UserError that is raised inside instead of raising it."""
        try:
            yield
        except UserError as error:
            self.add(error)

    def check(self) -> None:
        """Raises UserError if there are mistakes: the only one, or MistakesError."""
        errors = list(self._found.values())
        if errors:
            raise errors[0] if len(errors) == 1 else MistakesError(errors)


class ClusterError(RuntimeError):
    """Failure between hosts that no config change can fix; printed without a traceback, exit status 70."""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Error numbers of a full, read-only or broken disk."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Converts an exception caused by a full, read-only or broken disk into a UserError."""
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
    """Returns the command that installs an extra of setup.py; mrl is on no package index."""
    return f'pip install -e ".[{extra}]" in the checkout of mrl'


def printable(text: str) -> str:
    r"""Returns the text with control characters and lone surrogates escaped (ESC: \x1b); line ends and tabs stay."""
    return text if text.isprintable() else "".join(c if c in KEPT else escaped(c) for c in text)


def escaped(character: str) -> str:
    """Returns the character, or its escape sequence if it is not printable."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def out_of_memory(error: BaseException) -> bool:
    """Returns whether Python, the host or a GPU ran out of memory; torch reports this in three ways."""
    message = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in message
        or "Storage size calculation overflowed" in message
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type name if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def shown(value: Any) -> str:
    """Returns the repr of a user's value for an error message, cut to 100 characters."""
    if isinstance(value, int) and abs(value) >= 10**60:
        return f"a number of more than {len(hex(value)) - 3} hexadecimal digits"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
