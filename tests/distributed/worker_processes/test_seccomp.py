"""What a filter answers, on both architectures: its instructions are executed here as the kernel executes them."""

import errno
import os
import struct

import pytest

from mrl.distributed.worker_processes import seccomp
from mrl.distributed.worker_processes.system_calls import NEWEST, OTHERS, PROGRAMS, SHARED

ALLOWED, KILLED = "allowed", "killed"
ARCHITECTURES = [0xC000003E, 0xC00000B7]  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64
OTHER = 5_000_000  # a number that no process has: Linux allows up to 4194304


def answer(rules, column, number, arguments=(), *, only, architecture=None):
    """What classic BPF returns for a call."""
    program = [struct.unpack("=HBBI", one) for one in seccomp._program(rules, ARCHITECTURES[column], column, only=only)]
    wide = [value % (1 << 64) for value in (*arguments, *[0] * 6)][:6]
    data = struct.pack("=IIQ6Q", number % (1 << 32), architecture or ARCHITECTURES[column], 0, *wide)
    assert len(program) <= 4096
    place = value = 0
    while True:
        code, if_true, if_false, given = program[place]
        place += 1
        match code:
            case 0x20:
                [value] = struct.unpack_from("=I", data, given)
            case 0x54:
                value &= given
            case 0x15:
                place += if_true if value == given else if_false
            case 0x35:
                place += if_true if value >= given else if_false
            case 0x06:
                kind = given & 0xFFFF0000
                return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(kind) or errno.errorcode[given & 0xFFFF]
            case _:
                raise AssertionError(f"no instruction: {code:#x}")


def program_answers(column, name, *arguments):
    return answer(seccomp.program_allow_list(), column, seccomp.NUMBERS[name][column], arguments, only=True)


def worker_answers(column, name, *arguments):
    return answer(seccomp.worker_deny_list(), column, seccomp.NUMBERS[name][column], arguments, only=False)


@pytest.fixture(params=[0, 1], ids=["x86_64", "aarch64"])
def column(request):
    return request.param


def test_a_program_may_make_the_calls_of_its_list_and_no_other(column):
    rules = seccomp.program_allow_list()
    listed = {numbers[column]: name for name, numbers in PROGRAMS.items() if numbers[column] is not None}
    for number in range(NEWEST + 1):
        found = answer(rules, column, number, only=True)
        if number not in listed:
            named = {numbers[column]: name for name, numbers in (SHARED | OTHERS).items()}
            assert found == ("ENOSYS" if named.get(number) in ("clone3", "openat2") else "EPERM"), number
        elif rules[listed[number]] == ():
            assert found == ALLOWED, listed[number]


def test_calls_of_newer_kernels_and_other_conventions(column):
    for only in (True, False):
        rules = seccomp.program_allow_list() if only else seccomp.worker_deny_list()
        assert answer(rules, column, NEWEST + 1, only=only) == ("ENOSYS" if only else ALLOWED)
        assert answer(rules, column, 0x40000000 + 57, only=only) == "ENOSYS"
        assert answer(rules, column, 1, only=only, architecture=0x40000003) == KILLED
        assert answer(rules, column, 1, only=only, architecture=ARCHITECTURES[1 - column]) == KILLED


OWN = os.getpid()
PARENT = os.getppid()

OF_A_PROGRAM = [
    (ALLOWED, "mmap", 0, 4096, 3, 0x22),  # private, anonymous
    (ALLOWED, "mmap", 0, 4096, 3, 0x20022),  # MAP_STACK too
    (ALLOWED, "mmap", 0, 4096, 3, 0x01, 5),
    (ALLOWED, "mmap", 0, 4096, 5, 0x812, 5),  # a library: private, fixed
    ("EPERM", "mmap", 0, 4096, 3, 0x21),
    ("EPERM", "mmap", 0, 4096, 3, 0x23),
    ("EPERM", "mmap", 0, 4096, 3, 0x122),
    ("EPERM", "mmap", 0, 4096, 3, 0x40022),
    (ALLOWED, "openat", -100, 1, 0o100 | 0o2 | 0o1000),
    (ALLOWED, "openat", -100, 1, 0o2000000),
    ("EPERM", "openat", -100, 1, 0o1000),
    ("EPERM", "openat", -100, 1, 3),
    (ALLOWED, "clone", 0x3D0F00),  # a thread of glibc
    (ALLOWED, "clone", 0x7D0F00),  # a thread of musl
    ("EPERM", "clone", 17),
    ("EPERM", "clone", 0x4111),  # vfork
    ("EPERM", "clone", 0x3D0F00 | 0x10000000),
    ("EPERM", "clone", 0x10000),
    (ALLOWED, "kill", OWN, 9),
    ("EPERM", "kill", 0, 9),
    ("EPERM", "kill", -1, 9),
    ("EPERM", "kill", -OWN, 9),
    ("EPERM", "kill", OTHER, 0),
    (ALLOWED, "tgkill", OWN, OTHER, 10),
    ("EPERM", "tgkill", OTHER, OTHER, 10),
    (ALLOWED, "prlimit64", 0, 7),
    (ALLOWED, "prlimit64", OWN, 7),
    ("EPERM", "prlimit64", OTHER, 7),
    (ALLOWED, "fcntl", 3, 1030),
    ("EPERM", "fcntl", 3, 8),
    ("EPERM", "fcntl", 3, 1031),
    (ALLOWED, "ioctl", 1, 0x5401),
    ("EPERM", "ioctl", 1, 0x5412),
    ("EPERM", "ioctl", 1, 0x40086602),
    (ALLOWED, "prctl", 15),
    ("EPERM", "prctl", 1),
    ("EPERM", "prctl", 4),
    (ALLOWED, "socketpair", 1, 0o2000001),
    ("EPERM", "socketpair", 1, 2),
    ("EPERM", "socketpair", 1, 0o2000005),
    ("EPERM", "socketpair", 2, 1),
    (ALLOWED, "sendto", 3, 1, 1, 0, 0, 0),
    ("EPERM", "sendto", 3, 1, 1, 0, 4096, 110),
    ("EPERM", "sendto", 3, 1, 1, 0, 1 << 32, 110),
    (ALLOWED, "setpriority", 0, 0, 19),
    ("EPERM", "setpriority", 0, OTHER, 19),
    ("EPERM", "setpriority", 2, 0, 19),
    (ALLOWED, "sched_setaffinity", 0),
    ("EPERM", "sched_setaffinity", OTHER),
    ("EPERM", "socket", 1, 1),
    ("EPERM", "truncate"),
]

OF_A_WORKER = [
    (ALLOWED, "clone", 17),
    (ALLOWED, "clone", 0x4111),
    ("EPERM", "clone", 0x10000000 | 17),
    ("ENOSYS", "clone3"),
    ("ENOSYS", "io_uring_setup"),
    (ALLOWED, "mmap", 0, 4096, 3, 0x21),
    (ALLOWED, "socket", 2, 1),
    (ALLOWED, "prlimit64", 0),
    ("EPERM", "prlimit64", PARENT),
    (ALLOWED, "kill", OTHER, 9),
    (ALLOWED, "kill", 0, 9),
    ("EPERM", "kill", PARENT, 9),
    ("EPERM", "kill", -PARENT, 9),
    ("EPERM", "kill", -1, 9),
    ("EPERM", "tgkill", PARENT, PARENT, 9),
    (ALLOWED, "pidfd_open", OTHER),
    ("EPERM", "pidfd_open", PARENT),
    (ALLOWED, "fcntl", 3, 1033),
    ("EPERM", "fcntl", 3, 8),
    ("EPERM", "fcntl", 3, 15),
    (ALLOWED, "ioctl", 1, 0x5413),
    ("EPERM", "ioctl", 1, 0x5412),
    (ALLOWED, "ioprio_set", 1, 0),
    ("EPERM", "ioprio_set", 3, 0),
    ("EPERM", "shmget"),
    ("EPERM", "keyctl"),
    ("EPERM", "unshare"),
]


def test_arguments_of_a_program(column):
    found = [(program_answers(column, name, *given), name, *given) for _, name, *given in OF_A_PROGRAM]
    assert found == OF_A_PROGRAM


def test_arguments_of_a_worker(column):
    found = [(worker_answers(column, name, *given), name, *given) for _, name, *given in OF_A_WORKER]
    assert found == OF_A_WORKER


def test_without_sockets_a_pair_reaches_nobody(column):
    def found(name, *given):
        return answer(seccomp.without_sockets(), column, seccomp.NUMBERS[name][column], given, only=False)

    assert found("socket", 1, 1) == "EPERM"
    assert [found("socketpair", *given) for given in ((1, 1), (1, 5), (1, 2), (2, 1))] == [
        ALLOWED, ALLOWED, "EPERM", "EPERM"
    ]  # fmt: skip
    assert found("sendto", 3, 1, 1, 0, 4096) == ALLOWED
