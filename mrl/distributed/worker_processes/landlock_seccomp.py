"""Confinement that a Linux process applies to itself and its descendants, without privileges or a helper program.

*Landlock* (Linux 5.13) restricts writing, and optionally reading, to named folders. *seccomp* (`seccomp.py`) restricts
system calls. *Resource limits* restrict memory, CPU time, file size and open files. None of them can be undone.
`confine` returns the parts that a machine does not support.

Not restricted: checking whether a file exists and reading its size and times; changing mode, owner, times and
attributes of files unless `calls` is "program"; pipes and sockets that were open before. Imports no torch.
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
"""Devices that may be read and written; programs get only the first, because mapping /dev/zero allocates memory."""

_ADDRESS_SPACE_MB = 4096  # in addition to memory: libraries, and address space that threads reserve and never use
_OPEN_FILES = 256  # each pipe uses memory that no limit counts

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
        network: True to allow new sockets.
        writable: Folders below which files may change; None for no restriction.
        readable: Folders and files that may be read and executed, in addition to `writable`; None for no restriction.
        calls: System calls that are allowed. "any": all. "worker": all except those that reach processes above this
            one or change kernel state. "program": only those of a single-process program, without root's
            capabilities and without network.
        memory_mb: Memory of each process, MiB; 0: unlimited.
        file_mb: Size of the largest file that may be written, MiB; 0: unlimited.
        cpu_s: Processor time after which the process is killed, s; 0: unlimited.
    """

    network: bool = False
    writable: tuple[str, ...] | None = None
    readable: tuple[str, ...] | None = None
    calls: Literal["any", "worker", "program"] = "any"
    memory_mb: int = 0
    file_mb: int = 0
    cpu_s: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for contradicting attributes."""
        if self.network and self.calls == "program":
            raise ValueError("calls='program' allows no network: expected network=False")


def confine(confinement: Confinement) -> list[str]:
    """Confines this process and the processes that it will start.

    Landlock applies to the calling thread and its children only: call this before starting threads.

    Returns:
        Parts of `confinement` that this machine does not support, "part: reason" each; [] if all are in effect.
    """
    set_limit(resource.RLIMIT_DATA, confinement.memory_mb << 20)
    set_limit(resource.RLIMIT_FSIZE, confinement.file_mb << 20)
    set_limit(resource.RLIMIT_CPU, confinement.cpu_s)
    set_limit(resource.RLIMIT_CORE, 1)  # with 0 the kernel would still pipe core dumps to a crash collector
    problems: list[tuple[str, str]] = []
    if confinement.calls == "program":
        if confinement.memory_mb:
            set_limit(resource.RLIMIT_AS, (confinement.memory_mb + _ADDRESS_SPACE_MB) << 20)
        set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        problems += [("rights", _give_up_rights())]
    if confinement.writable is not None or confinement.readable is not None:
        problems += [("files", _landlock(confinement))]
    if confinement.calls == "program":
        problems += [("network and processes", seccomp.install(seccomp.program_allow_list(), only=True))]
    if confinement.calls == "worker":
        problems += [("system calls", seccomp.install(seccomp.worker_deny_list(), only=False))]
    if confinement.calls != "program" and not confinement.network:
        problems += [("network", seccomp.install(seccomp.without_sockets(), only=False))]
    return [f"{what}: {problem}" for what, problem in problems if problem]


def set_limit(which: int, value: int) -> None:
    """Sets the soft and the hard resource limit; a value of 0 changes nothing."""
    if value:
        _, most = resource.getrlimit(which)
        wanted = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (wanted, wanted))


def _give_up_rights() -> str:
    """Drops all capabilities of root; returns the reason if that fails, else ""."""
    number = seccomp.number_of("capset")
    if number is None:
        return f"the number of capset is unknown for {sys.platform} on {platform.machine()}"
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    done = _call(number, header, bytes(24))
    return os.strerror(-done) if done else ""


def _landlock(confinement: Confinement) -> str:
    """Restricts file access; returns the reason if that fails, else ""."""
    version = _call(_CREATE_RULESET, None, 0, _VERSION) if sys.platform == "linux" else -1
    if version < 1:
        return "this kernel has no Landlock"
    change = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (change if confinement.writable is not None else 0) | (_READ if confinement.readable is not None else 0)
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_SIGNAL) if version >= 6 else struct.pack("=Q", handled)
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return f"Landlock: {os.strerror(-ruleset)}"
    try:
        for path in confinement.writable or ():
            _allow(ruleset, path, handled)
        for path in DEVICES[:1] if confinement.calls == "program" else DEVICES:
            _allow(ruleset, path, handled & (_READ | _WRITE_FILE | _TRUNCATE))
        for path in confinement.readable or ():
            _allow(ruleset, path, handled & _READ)
        prctl.set_attribute(prctl.NO_NEW_PRIVS, 1)
        done = _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return f"Landlock: {os.strerror(-done)}" if done else ""


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Adds a Landlock rule for a path; skips paths that do not exist."""
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
    """Returns the result of a system call, or the negative errno."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    given = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result = int(call(ctypes.c_long(number), *given))
    return result if result >= 0 else -ctypes.get_errno()
