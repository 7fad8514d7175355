"""System-call filters (Linux seccomp) for a process and its descendants; a filter cannot be removed.

Untrusted programs get an allow list. Workers, which may start processes of their own, get a deny list. A refused call
fails with EPERM, which Python raises as PermissionError. Two kinds of calls fail with ENOSYS instead, so that C
libraries fall back to an older call: calls newer than `system_calls.py`, and calls whose arguments are in memory, where
a filter cannot read them (clone3, openat2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mrl.distributed.worker_processes import prctl
from mrl.distributed.worker_processes.system_calls import NEWEST, OTHERS, PROGRAMS, SHARED

NUMBERS = PROGRAMS | SHARED | OTHERS

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> seccomp's number of the architecture, and the column in NUMBERS."""

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_X32 = 0x40000000  # numbers of the other calling convention of x86_64

# Opcodes of classic BPF.
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06

_UNREADABLE = {"clone3": errno.ENOSYS, "openat2": errno.ENOSYS}  # their arguments are in memory
_ALL_BITS = 0xFFFFFFFF
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_CLONE_THREAD = 0x10000 | 0x100  # CLONE_THREAD | CLONE_VM
_MMAP_BITS = 0x0F | 0x20 | 0x100 | 0x40000  # type, MAP_ANONYMOUS, MAP_GROWSDOWN, MAP_HUGETLB
_MMAP_KINDS = (0x01, 0x03, 0x02, 0x22, 0x28)  # of a file: shared, private; of no file: private, droppable
_OPEN_BITS = 0x203  # O_ACCMODE | O_TRUNC
_OPEN_MODES = (0x000, 0x001, 0x002, 0x201, 0x202)  # not O_RDONLY | O_TRUNC: Landlock refuses that since Linux 6.2
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # descriptors, flags, locks of files, F_GETPIPE_SZ
_FCNTL_FOR_OTHERS = (8, 10, 15, 1024)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIO*
_IOCTL_FOR_OTHERS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_PRCTL = (3, 15, 16, 23, 0x53564D41)  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_SET_VMA
_AF_UNIX, _SOCKET_TYPE_BITS, _SOCK_STREAM, _SOCK_SEQPACKET = 1, 0x0F, 1, 5


@dataclass(frozen=True)
class Check:
    """A condition on one argument of a system call.

    Attributes:
        argument: Index of the argument, from 0.
        values: 32-bit values that are allowed, or refused, after applying `mask`.
        mask: Bits that are compared.
        refused: True if `values` are the refused values.
        high: True to compare the upper half of the 64-bit argument.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    refused: bool = False
    high: bool = False

    def statements(self) -> list[bytes]:
        """Returns BPF that fails the call unless the condition is true, and otherwise continues."""
        found = [_load(16 + 8 * self.argument + 4 * self.high)]
        if self.mask != _ALL_BITS:
            found.append(_statement(_AND, 0, 0, self.mask))
        values = [value & _ALL_BITS for value in self.values]
        if self.refused:
            for value in values:
                found += [_statement(_JUMP_EQUAL, 0, 1, value), _fail(errno.EPERM)]
            return found
        to_end = range(len(values), 0, -1)  # statements that a match skips, the failing one included
        found += [_statement(_JUMP_EQUAL, skipped, 0, value) for value, skipped in zip(values, to_end, strict=True)]
        return [*found, _fail(errno.EPERM)]


Rules = Mapping[str, tuple[Check, ...] | int]
"""Name of a call -> the checks after which it is allowed, or the error with which it fails."""


def program_allow_list() -> Rules:
    """Returns the allow list of an untrusted program; calls that it does not name are refused."""
    own = os.getpid()
    itself = (Check(0, (0, own)),)
    own_priority = (Check(0, (0,)), Check(1, (0, own)))
    checked: Rules = {
        "mmap": (Check(3, _MMAP_KINDS, _MMAP_BITS),),
        "openat": (Check(2, _OPEN_MODES, _OPEN_BITS),),
        "open": (Check(1, _OPEN_MODES, _OPEN_BITS),),
        "fallocate": errno.EOPNOTSUPP,  # fills a disk faster than `usage.py` samples; C libraries fall back to writes
        "fcntl": (Check(1, _FCNTL),),
        "ioctl": (Check(1, _IOCTL),),
        "clone": (Check(0, (_CLONE_THREAD,), _CLONE_THREAD | _NEW_NAMESPACES),),
        "prctl": (Check(0, _PRCTL),),
        "kill": (Check(0, (own,)),),
        "tgkill": (Check(0, (own,)),),
        "socketpair": (Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM,), _SOCKET_TYPE_BITS)),
        "sendto": (Check(4, (0,)), Check(4, (0,), high=True)),  # without an address
        "getpriority": own_priority,
        "setpriority": own_priority,
        **dict.fromkeys(("prlimit64", "sched_getaffinity", "sched_setaffinity", "sched_getparam"), itself),
        **dict.fromkeys(("sched_getscheduler", "getpgid", "getsid"), itself),
    }
    return {**_UNREADABLE, **checked, **{name: () for name in PROGRAMS if name not in checked}}


def worker_deny_list() -> Rules:
    """Returns the deny list of a worker and its descendants.

    It refuses System V IPC, namespaces, mounts and other system-wide state; changes of the limits, priority and
    affinity of other processes; and signals to the supervisor. Signals are refused by the supervisor's pid, because
    Landlock before Linux 6.12 cannot scope them.
    """
    own, supervisor = os.getpid(), os.getppid()
    itself = (Check(0, (0, own)),)
    not_supervisor = (Check(0, (-1, supervisor, -supervisor), refused=True),)
    return {
        **_UNREADABLE,
        "prlimit64": itself,
        "clone": (Check(0, (0,), _NEW_NAMESPACES),),
        "ioctl": (Check(1, _IOCTL_FOR_OTHERS, refused=True),),
        "fcntl": (Check(1, _FCNTL_FOR_OTHERS, refused=True),),
        "setpriority": (Check(0, (0,)), Check(1, (0, own))),
        "ioprio_set": (Check(0, (1,)), Check(1, (0, own))),
        **dict.fromkeys(("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), itself),
        **dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo"), not_supervisor),
        **dict.fromkeys(("rt_tgsigqueueinfo", "pidfd_open"), not_supervisor),
        **dict.fromkeys(SHARED, errno.EPERM),
        "io_uring_setup": errno.ENOSYS,  # it makes calls that no filter sees
    }


def without_sockets() -> Rules:
    """Returns the deny list for sockets; socket pairs that can only reach each other are allowed."""
    return {
        "socket": errno.EPERM,
        "socketpair": (Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM, _SOCK_SEQPACKET), _SOCKET_TYPE_BITS)),
        "io_uring_setup": errno.ENOSYS,
    }


def number_of(name: str) -> int | None:
    """Returns the number of a system call on this machine; None if unknown for its architecture."""
    known = sys.platform == "linux" and platform.machine() in _ARCHITECTURES
    return NUMBERS[name][_ARCHITECTURES[platform.machine()][1]] if known else None


def install(rules: Rules, *, only: bool) -> str:
    """Adds a filter to all threads of this process.

    Args:
        rules: Allow list or deny list.
        only: True to refuse calls that `rules` does not name; False to allow them.

    Returns:
        The reason why the filter could not be installed; "" if it was.
    """
    call = number_of("seccomp")
    if call is None:
        return f"no system-call filter is available for {sys.platform} on {platform.machine()}"
    code = b"".join(_program(rules, *_ARCHITECTURES[platform.machine()], only=only))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl.set_attribute(prctl.NO_NEW_PRIVS, 1)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    done = library.syscall(*map(ctypes.c_long, (call, _SET_MODE_FILTER, _ALL_THREADS)), program)
    if done == 0:
        return ""
    return f"seccomp: {os.strerror(ctypes.get_errno()) if done < 0 else 'a thread has a filter of its own'}"


def _program(rules: Rules, architecture: int, column: int, *, only: bool) -> list[bytes]:
    """Returns a filter in classic BPF."""
    program = [_load(4), _statement(_JUMP_EQUAL, 1, 0, architecture), _statement(_RETURN, 0, 0, _KILL), _load(0)]
    program += [_statement(_JUMP_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    for name, rule in rules.items():
        number = NUMBERS[name][column]
        if number is not None:
            block = [_fail(rule)] if isinstance(rule, int) else [word for check in rule for word in check.statements()]
            block += [] if isinstance(rule, int) else [_statement(_RETURN, 0, 0, _ALLOW)]
            program += [_statement(_JUMP_EQUAL, 0, len(block), number), *block]
    if not only:
        return [*program, _statement(_RETURN, 0, 0, _ALLOW)]
    return [*program, _statement(_JUMP_AT_LEAST, 0, 1, NEWEST + 1), _fail(errno.ENOSYS), _fail(errno.EPERM)]


def _statement(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    """Returns a load of 32 bits: at offset 0 the call's number, 4 the architecture, from 16 on its arguments."""
    return _statement(_LOAD, 0, 0, offset)


def _fail(error: int) -> bytes:
    return _statement(_RETURN, 0, 0, _ERRNO | error)
