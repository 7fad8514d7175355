"""Attributes that Linux keeps of a process (prctl), set for this one. Imports no torch."""

from __future__ import annotations

import ctypes
import sys

PDEATHSIG = 1
"""Signal that this process gets when its parent ends."""

CHILD_SUBREAPER = 36
"""1: orphans below this process become its children."""

NO_NEW_PRIVS = 38
"""1: programs that this process starts gain no rights, which Landlock and seccomp require."""


def set_attribute(option: int, value: int) -> None:
    """Sets an attribute of this process, where it runs on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
