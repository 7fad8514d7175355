"""How a process ends that cannot end in order: it says why, and goes, wherever its main thread is.

Owns the print of the message, which no slow disk may keep, the choice of the process that prints where ranks cannot ask
each other, and the end without Python's own.
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
"""What may hang, such as a folder on a disk that is gone, is waited for so long."""

_names: list[socket.socket] = []


def say(text: str, advice: Callable[[], str]) -> None:
    """Prints a message, and then what `advice` says, if it says it in time."""
    sys.stderr.write(f"mrl: error: {text}\n")
    sys.stderr.flush()
    more: list[str] = []
    _within(WAIT_S, lambda: more.append(advice()))
    if more and more[0]:
        sys.stderr.write(f"{more[0]}\n")
        sys.stderr.flush()


def is_mine_to_say(what: str) -> bool:
    """Whether no other process of this host has asked the same before; the kernel forgets it with the process."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0mrl {what}")
    except OSError:
        name.close()
        return False
    _names.append(name)
    return True


def leave(status: int) -> NoReturn:
    """Ends this process and those that it started."""
    _within(WAIT_S, lambda: [child.kill() for child in psutil.Process().children(recursive=True)])
    _within(WAIT_S, sys.stdout.flush)
    os._exit(status)


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Calls a function that may hang, and goes on."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
