"""Supervisor of a worker: ends the worker together with every process that foreign code started in it.

Runs the worker in a session of its own under a memory limit. On Linux the supervisor is the subreaper of the tree, so
even detached processes are found and killed. It runs no foreign code, so it still works when the worker hangs. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from types import FrameType

import psutil

from mrl.distributed.worker_processes import prctl, protocol
from mrl.distributed.worker_processes.landlock_seccomp import set_limit

MIB = 1 << 20

IGNORED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM}
"""Signals that terminals and schedulers send to every process of a job: workers leave them to their parent."""

_SAMPLE_S = 0.5  # interval between two measurements of resource usage
_SAMPLE_FRAC = 0.01  # largest share of a core that the measurements use, on machines with thousands of processes
_SHOWN_FRAMES = 5
_EXIT_LIMIT_S = 4.0  # for killed processes to disappear


@dataclass(frozen=True)
class SupervisorArgs:
    """Command-line arguments of the supervisor.

    Attributes:
        memory_name: Config key of the memory limit, for messages.
        parent: Process id of the parent; the supervisor ends when the parent does.
        commands: File descriptor from which the worker reads.
        answers: File descriptor to which the worker and the supervisor write.
        memory_limit_mb: Memory limit of the worker and its descendants together, MiB; 0: unlimited.
        key: Random number that authenticates the worker's lines.
        max_processes: Number of simultaneous processes, the worker and its descendants; 0: unlimited.
    """

    memory_name: str
    parent: int
    commands: int
    answers: int
    memory_limit_mb: int
    key: int
    max_processes: int

    def arguments(self) -> list[str]:
        """Returns the arguments as words of a command line."""
        return [str(value) for value in astuple(self)]

    @staticmethod
    def read(arguments: Sequence[str]) -> SupervisorArgs:
        """Parses the words of `arguments`."""
        name, *numbers = arguments
        return SupervisorArgs(name, *map(int, numbers))


def supervise(args: SupervisorArgs, work: Callable[[SupervisorArgs], None]) -> None:
    """Runs `work` in a forked worker until it ends, exceeds a limit, or the parent closes the pipe."""
    for number in IGNORED:
        signal.signal(number, _ignore)  # unlike SIG_IGN, a handler is not inherited by executed programs
    signal.signal(signal.SIGCHLD, _ignore)
    os.setsid()
    for end in (args.commands, args.answers):
        os.set_inheritable(end, False)
    prctl.set_attribute(prctl.CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        prctl.set_attribute(prctl.PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
            os.setpgid(0, 0)  # a signal to the worker's group must not reach the supervisor
            # per process; gives a MemoryError in Python before the limit of the tree kills the worker
            set_limit(resource.RLIMIT_DATA, args.memory_limit_mb * MIB)
            _work(args, work)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    why, limit = _watch(worker, args)
    _end_all()
    if why:
        with contextlib.suppress(OSError):
            os.write(args.answers, protocol.ended_line(args.key, why, limit))


def _work(args: SupervisorArgs, work: Callable[[SupervisorArgs], None]) -> None:
    """Runs `work`; an exception ends this process here instead of unwinding the frames of the forked parent."""
    try:
        work(args)
    except BaseException:  # noqa: BLE001 - a process of foreign code may raise anything
        traceback.print_exc(limit=-_SHOWN_FRAMES)
        os._exit(1)


def _watch(worker: int, args: SupervisorArgs) -> tuple[str, str]:
    """Waits until the worker ends or exceeds a limit, or the parent ends or closes its pipe.

    Returns:
        How the worker ended, and the name of the exceeded limit ("" for none); both "" in the parent's case.
    """
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)  # a child's end ends the wait below
    poll = select.poll()
    poll.register(args.commands, 0)  # POLLHUP is always reported
    poll.register(woken, select.POLLIN)
    pause_s = _SAMPLE_S
    while (status := _reap(worker)) is None:
        if os.getppid() != args.parent or args.commands in dict(poll.poll(pause_s * 1000)):
            return "", ""
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        start = time.monotonic()
        for limit, most in _exceeded(args):
            os.kill(worker, signal.SIGKILL)  # before its children: it must not continue without them
            return f"with what it started it took more than {most}", limit
        pause_s = max(_SAMPLE_S, (time.monotonic() - start) / _SAMPLE_FRAC)
    return (f"signal {-status}" if status < 0 else f"exit status {status}"), ""


def _exceeded(args: SupervisorArgs) -> Iterator[tuple[str, str]]:
    """Yields (name, limit in words) of each limit that the worker and its descendants exceed."""
    if args.max_processes and len(psutil.Process().children(recursive=True)) > args.max_processes:
        yield "processes", f"{args.max_processes} processes"
    if args.memory_limit_mb and _memory_mb(args.memory_limit_mb) > args.memory_limit_mb:
        yield "memory", f"{args.memory_name}={args.memory_limit_mb}"


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles a signal by doing nothing: it only interrupts a wait."""


def _reap(worker: int) -> int | None:
    """Reaps ended processes; returns the worker's exit status (negative for a signal), None while it runs."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_all() -> None:
    """Kills all descendants of this process, including those started meanwhile."""
    end = time.monotonic() + _EXIT_LIMIT_S
    while time.monotonic() < end:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _memory_mb(limit_mb: float) -> float:
    """Returns the memory of all descendants, MiB.

    The sum of resident sizes counts shared pages repeatedly. If it exceeds `limit_mb`, the slower proportional sizes
    (PSS) are summed instead, on Linux.
    """
    found = psutil.Process().children(recursive=True)
    total = 0.0
    for exact in (False, True):
        total = 0.0
        for process in found:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss / MIB if exact else process.memory_info().rss / MIB
        if total <= limit_mb or sys.platform != "linux":
            break
    return total
