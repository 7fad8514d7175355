"""Locks that Linux lets a process put on itself and on all that it starts; they need no rights and no program.

*Landlock* (Linux 5.13): files change only in named folders and, where asked, are read only in named folders. *seccomp*
(`seccomp.py`): which system calls may be made. *Limits* of memory, processor time, size of a file and open files. None
can be taken off again. `confine` returns what a machine does not have.

What they do not refuse: asking whether a file exists, and for its size and times; changing mode, owner, times and
attributes of files where `calls` is not "program"; pipes and sockets that were open before. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl.distributed.worker_processes import prctl, seccomp

DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that may be read and written; a program has only the first, because shared /dev/zero is memory."""

_ADDRESS_SPACE_MB = 4096  # besides memory: libraries, and what threads reserve and never use
_OPEN_FILES = 256  # each pipe holds memory that no limit counts

# Access rights of Landlock, bits.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_CHANGE = sum(1 << bit for bit in range(4, 13)) | _WRITE_FILE  # remove, make: files, folders, links, devices
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPE_SIGNAL = 1 << 1  # to processes that are not confined; Linux 6.12
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION = 1

_CAPABILITIES_V3 = 0x20080522


@dataclass(frozen=True)
class Confinement:
    """Rights that a process keeps.

    Attributes:
        network: Whether sockets may be made.
        writable: Folders below which files may change; None: wherever the user may.
        readable: Folders and files below which files may be read and run, in addition to the writable ones; None: all.
        calls: System calls that may be made. "any": all. "worker": not those that reach processes above this one or
            leave something behind in the kernel. "program": only what a program needs that stays in its own process,
            without root's rights and without network.
        memory_mb: Memory of each process, MiB; 0: any.
        file_mb: Size of the largest file that may be written, MiB; 0: any.
        cpu_s: Processor time after which the process is killed, s; 0: any.
    """

    network: bool = False
    writable: tuple[str, ...] | None = None
    readable: tuple[str, ...] | None = None
    calls: Literal["any", "worker", "program"] = "any"
    memory_mb: int = 0
    file_mb: int = 0
    cpu_s: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot hold together."""
        if self.network and self.calls == "program":
            raise ValueError("calls='program' has no network: expected network=False")


def confine(asked: Confinement) -> list[str]:
    """Confines this process and all that it will start.

    Files are confined for the calling thread and what it starts: there should be no other thread yet.

    Returns:
        What was asked for and this machine does not have, a few words each; [] where all of it holds.
    """
    set_limit(resource.RLIMIT_DATA, asked.memory_mb << 20)
    set_limit(resource.RLIMIT_FSIZE, asked.file_mb << 20)
    set_limit(resource.RLIMIT_CPU, asked.cpu_s)
    set_limit(resource.RLIMIT_CORE, 1)  # 0 would still hand a crash to a program that collects them, 1 does not
    problems: list[tuple[str, str]] = []
    if asked.calls == "program":
        if asked.memory_mb:
            set_limit(resource.RLIMIT_AS, (asked.memory_mb + _ADDRESS_SPACE_MB) << 20)
        set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        problems += [("rights", _give_up_rights())]
    if asked.writable is not None or asked.readable is not None:
        problems += [("files", _landlock(asked))]
    if asked.calls == "program":
        problems += [("network and processes", seccomp.install(seccomp.of_programs(), only=True))]
    if asked.calls == "worker":
        problems += [("system calls", seccomp.install(seccomp.of_workers(), only=False))]
    if asked.calls != "program" and not asked.network:
        problems += [("network", seccomp.install(seccomp.without_sockets(), only=False))]
    return [f"{what}: {problem}" for what, problem in problems if problem]


def set_limit(which: int, value: int) -> None:
    """Sets a limit that cannot be raised again; 0: none."""
    if value:
        _, most = resource.getrlimit(which)
        wanted = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (wanted, wanted))


def _give_up_rights() -> str:
    """Gives up the rights of root (capabilities); returns why that cannot be, "" where this process has none now."""
    number = seccomp.number_of("capset")
    if number is None:
        return f"they are not known for {sys.platform} on {platform.machine()}"
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    done = _call(number, header, bytes(24))
    return os.strerror(-done) if done else ""


def _landlock(asked: Confinement) -> str:
    """Returns why files are not confined, "" where they are."""
    version = _call(_CREATE_RULESET, None, 0, _VERSION) if sys.platform == "linux" else -1
    if version < 1:
        return "this kernel has no Landlock"
    change = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (change if asked.writable is not None else 0) | (_READ if asked.readable is not None else 0)
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_SIGNAL) if version >= 6 else struct.pack("=Q", handled)
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return f"Landlock: {os.strerror(-ruleset)}"
    try:
        for path in asked.writable or ():
            _allow(ruleset, path, handled)
        for path in DEVICES[:1] if asked.calls == "program" else DEVICES:
            _allow(ruleset, path, handled & (_READ | _WRITE_FILE | _TRUNCATE))
        for path in asked.readable or ():
            _allow(ruleset, path, handled & _READ)
        prctl.set_attribute(prctl.NO_NEW_PRIVS, 1)
        done = _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return f"Landlock: {os.strerror(-done)}" if done else ""


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Adds a rule; what does not exist needs none."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        kept = rights if Path(path).is_dir() else rights & _OF_FILES
        if kept:
            _call(_ADD_RULE, ruleset, 1, struct.pack("=Qi", kept, place), 0)
    finally:
        os.close(place)


def _call(number: int, *arguments: bytes | int | None) -> int:
    """A system call's result, or the negative error number."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    given = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result = int(call(ctypes.c_long(number), *given))
    return result if result >= 0 else -ctypes.get_errno()
