"""What a process may not do any more, nor all that it starts: Linux's own locks, which need no rights, no program.

Owns two of them. *Landlock* (Linux 5.13): files change only in named folders, and where asked are only read in named
folders. *seccomp*: no sockets, and where asked no further processes and no signals to others. Neither can be taken off
again. Each is used where the kernel has it; `confine` says which are. What they do not hold back: reading what the user
may read (unless folders are named), changing the owner, mode and times of files (`chmod`, `utime`), pipes and sockets
that were open before, and processor time. Imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""May be written to; a program that cannot is lost."""

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

# Access rights of Landlock, bits.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_CHANGE = sum(1 << bit for bit in range(4, 13)) | _WRITE_FILE  # remove, make: files, folders, links, devices
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SCOPE_SIGNAL = 1 << 1  # to processes that are not confined; Linux 6.12
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION = 1

# Of each architecture: its number for seccomp, and those of its system calls.
_CALLS = {
    "x86_64": (0xC000003E, {"socket": 41, "io_uring_setup": 425, "clone": 56, "fork": 57, "vfork": 58, "clone3": 435,
                            "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424, "pidfd_open": 434,
                            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "rt_sigqueueinfo": 129,
                            "rt_tgsigqueueinfo": 297, "capset": 126}),
    "aarch64": (0xC00000B7, {"socket": 198, "io_uring_setup": 425, "clone": 220, "clone3": 435,
                             "kill": 129, "tkill": 130, "tgkill": 131, "pidfd_send_signal": 424, "pidfd_open": 434,
                             "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "rt_sigqueueinfo": 138,
                             "rt_tgsigqueueinfo": 240, "capset": 91}),
}  # fmt: skip
_NETWORK = ("socket", "io_uring_setup")
_OTHERS = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_send_signal", "pidfd_open", "rt_sigqueueinfo",
           "rt_tgsigqueueinfo", "tkill")  # fmt: skip
_CLONE_THREAD = 0x10000
_CAPABILITIES_V3 = 0x20080522
_X32 = 0x40000000  # numbers of the other calling convention of x86_64


@dataclass(frozen=True)
class Confinement:
    """What is asked for.

    Attributes:
        network: Sockets may be made.
        writable: Folders below which files may change; None: wherever the user may.
        readable: Folders and files below which files may be read and run, the writable ones besides; None: all.
        processes: Processes may be started, and signalled; without them all rights of root are given up too.
        memory_mb: That each process may allocate, MiB; 0: any.
        file_mb: Largest file that may be written, MiB; 0: any.
        cpu_s: Of processor time, then the process ends; 0: any.
    """

    network: bool = False
    writable: tuple[str, ...] | None = None
    readable: tuple[str, ...] | None = None
    processes: bool = True
    memory_mb: int = 0
    file_mb: int = 0
    cpu_s: int = 0


def confine(asked: Confinement) -> list[str]:
    """Confines this process and all that it will start; for a process with one thread.

    Returns:
        What was asked for and could not be had on this machine, a few words each; [] where all of it holds.
    """
    _limit(resource.RLIMIT_DATA, asked.memory_mb << 20)
    _limit(resource.RLIMIT_FSIZE, asked.file_mb << 20)
    _limit(resource.RLIMIT_CPU, asked.cpu_s)
    _limit(resource.RLIMIT_CORE, 0, always=True)
    missing = []
    if not asked.processes:
        missing += ["rights: " + problem for problem in _give_up_rights()]
    if asked.writable is not None or asked.readable is not None:
        missing += ["files: " + problem for problem in _landlock(asked)]
    if not asked.network or not asked.processes:
        parts = [word for word, open_ in (("network", asked.network), ("processes", asked.processes)) if not open_]
        missing += [" and ".join(parts) + ": " + problem for problem in _seccomp(asked)]
    return missing


def _limit(which: int, value: int, always: bool = False) -> None:
    if value or always:
        _, most = resource.getrlimit(which)
        wanted = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (wanted, wanted))


def _give_up_rights() -> list[str]:
    """Why the rights of root (capabilities) are not given up, [] where they are, or there were none."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return [f"they are not known for {sys.platform} on {platform.machine()}"]
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    done = _call(_CALLS[platform.machine()][1]["capset"], header, bytes(24))
    return [] if done == 0 else [os.strerror(-done)]


def _landlock(asked: Confinement) -> list[str]:
    """Why files are not confined, [] where they are."""
    version = _call(_CREATE_RULESET, None, 0, _VERSION) if sys.platform == "linux" else -1
    if version < 1:
        return ["this kernel has no Landlock"]
    change = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (change if asked.writable is not None else 0) | (_READ if asked.readable is not None else 0)
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_SIGNAL) if version >= 6 else struct.pack("=Q", handled)
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return [f"Landlock: {os.strerror(-ruleset)}"]
    try:
        for path in asked.writable or ():
            _allow(ruleset, path, handled)
        for path in DEVICES:
            _allow(ruleset, path, handled & (_READ | _WRITE_FILE | _TRUNCATE))
        for path in asked.readable or ():
            _allow(ruleset, path, handled & _READ)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
        done = _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return [] if done == 0 else [f"Landlock: {os.strerror(-done)}"]


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


def _seccomp(asked: Confinement) -> list[str]:
    """Why system calls are not filtered, [] where they are."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return [f"there is no filter of system calls for {sys.platform} on {platform.machine()}"]
    architecture, numbers = _CALLS[platform.machine()]
    program = _program(architecture, numbers, asked)
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    done = _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_)
    return [] if done == 0 else [f"seccomp: {os.strerror(-done)}"]


def _program(architecture: int, numbers: dict[str, int], asked: Confinement) -> list[bytes]:
    """A filter in classic BPF: each refused call gives EPERM, clone3 ENOSYS, on which the C library takes clone."""
    program = [_load(4), _skip_unless_equal(architecture, 1, inverted=True), _return(_KILL), _load(0)]
    program += [_statement(0x35, 0, 1, _X32), _return(_ERRNO | errno.ENOSYS)]  # jump if greater or equal
    refused = list(_NETWORK if not asked.network else ())
    if not asked.processes:
        refused += [*_OTHERS, "fork", "vfork"]
        program += _refuse(numbers["clone3"], errno.ENOSYS)
        threads = [_load(16), _statement(0x45, 1, 0, _CLONE_THREAD), _return(_ERRNO | errno.EPERM), _return(_ALLOW)]
        program += [_skip_unless_equal(numbers["clone"], len(threads)), *threads]
        own = [_load(16), _skip_unless_equal(os.getpid(), 1), _return(_ALLOW), _return(_ERRNO | errno.EPERM)]
        for call in ("kill", "tgkill"):
            program += [_skip_unless_equal(numbers[call], len(own)), *own]
    for call in refused:
        if call in numbers:
            program += _refuse(numbers[call], errno.EPERM)
    return [*program, _return(_ALLOW)]


def _refuse(number: int, error: int) -> list[bytes]:
    return [_skip_unless_equal(number, 1), _return(_ERRNO | error)]


def _statement(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    """32 bits of the call: 0 its number, 4 the architecture, 16 the lower half of its first argument."""
    return _statement(0x20, 0, 0, offset)


def _skip_unless_equal(value: int, count: int, inverted: bool = False) -> bytes:
    return _statement(0x15, count if inverted else 0, 0 if inverted else count, value)


def _return(action: int) -> bytes:
    return _statement(0x06, 0, 0, action)


def _call(number: int, *arguments: bytes | int | None) -> int:
    """A system call's result, or the negative error number."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    given = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result = int(call(ctypes.c_long(number), *given))
    return result if result >= 0 else -ctypes.get_errno()


def _prctl(option: int, value: int, pointer: bytes | int) -> int:
    given = ctypes.c_ulong(pointer) if isinstance(pointer, int) else pointer
    zero = ctypes.c_ulong(0)
    done = int(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), given, zero, zero))
    return done if done >= 0 else -ctypes.get_errno()
