"""The one exception that a user can mend.

Owns `UserError` and how another library's error is quoted in one. The command line prints its message without a
traceback and exits with status 2; every other exception is a defect or a broken cluster and keeps its traceback.
"""


class UserError(ValueError):
    """A mistake in config, data or files.

    The message says what came, what was expected, which key, file or tensor, and what to do.

    Attributes:
        everywhere: True where every rank of the job raises this same error, so that one rank prints it.
        at: What the job was doing, "step 12, reward"; "" where no step had begun.
    """

    everywhere: bool = False
    at: str = ""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
