"""Process attributes of Linux (prctl). Imports no torch."""

from __future__ import annotations

import ctypes
import sys

PDEATHSIG = 1
"""Signal that this process gets when its parent ends."""

CHILD_SUBREAPER = 36
"""Set to 1, orphaned descendants become children of this process."""

NO_NEW_PRIVS = 38
"""Set to 1, programs that this process executes gain no privileges; Landlock and seccomp require it."""


def set_attribute(option: int, value: int) -> None:
    """Sets an attribute of this process; does nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
