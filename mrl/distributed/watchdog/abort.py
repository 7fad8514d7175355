"""Abrupt end of a process that cannot shut down in order: prints a message and exits, whatever the main thread does.

Printing and clean-up run in threads with a time limit, since a disk may hang. If ranks cannot communicate, an abstract
socket name elects the one process per host that prints.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil

WAIT_S = 2.0
"""Time limit of a call that may hang, for instance on a disk that is gone, s."""

_names: list[socket.socket] = []

on_message: Callable[[str], None] | None = None
"""Receives each message of `print_error`, to write it into a log; it may hang."""


def print_error(text: str, advice: Callable[[], str]) -> None:
    """Prints an error message, followed by the text of `advice` if that returns within WAIT_S."""
    sys.stderr.write(f"mrl: error: {text}\n")
    sys.stderr.flush()
    if on_message is not None:
        write = on_message
        _call_with_timeout(WAIT_S, lambda: write(f"error: {text}"))
    more: list[str] = []
    _call_with_timeout(WAIT_S, lambda: more.append(advice()))
    if more and more[0]:
        sys.stderr.write(f"{more[0]}\n")
        sys.stderr.flush()


def claim_message(what: str) -> bool:
    """Returns whether this is the first process of the host to claim the message `what`, until that process ends."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0mrl {what}")
    except OSError:
        name.close()
        return False
    _names.append(name)
    return True


def hard_exit(status: int) -> NoReturn:
    """Kills this process's children, then exits without Python's clean-up."""
    _call_with_timeout(WAIT_S, lambda: [child.kill() for child in psutil.Process().children(recursive=True)])
    _call_with_timeout(WAIT_S, sys.stdout.flush)
    os._exit(status)


def _call_with_timeout(seconds: float, function: Callable[[], object]) -> None:
    """Calls a function that may hang and waits at most `seconds` for it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
