"""The process around a worker: what foreign code starts in it ends with it.

Owns the worker's surroundings: a session of its own, its limit of memory, and its end together with every process that
it started, however these detached themselves: on Linux orphans come back to the keeper. It runs no foreign code, so it
is there when the worker hangs. Imports no torch.
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
"""Signals that a terminal or a scheduler sends to every process of a job: a worker leaves them to its parent."""

_LOOK_S = 0.5  # between two looks at the memory
_LOOK_FRAC = 0.01  # of a core for them, on a machine of thousands of processes
_SHOWN_FRAMES = 5
_EXIT_LIMIT_S = 4.0  # for killed processes to be gone


@dataclass(frozen=True)
class Bounds:
    """What the keeper is told by its parent.

    Attributes:
        memory_name: How the user calls the limit of memory, for messages.
        parent: Process id; the keeper ends when it does.
        commands: File descriptor on which the worker reads.
        answers: File descriptor on which worker and keeper write.
        memory_limit_mb: Of the worker and all that it starts together, MiB; 0: none.
        key: Marks what the worker writes.
        max_processes: Of the worker and all that it starts together, at one time; 0: any number.
    """

    memory_name: str
    parent: int
    commands: int
    answers: int
    memory_limit_mb: int
    key: int
    max_processes: int

    def arguments(self) -> list[str]:
        """For the command line of the keeper."""
        return [str(value) for value in astuple(self)]

    @staticmethod
    def read(arguments: Sequence[str]) -> Bounds:
        """What `arguments` wrote."""
        name, *numbers = arguments
        return Bounds(name, *map(int, numbers))


def keep(bounds: Bounds, work: Callable[[Bounds], None]) -> None:
    """Runs `work` in a process of its own, until that ends or the parent closes the pipe."""
    for number in IGNORED:
        signal.signal(number, _nothing)  # unlike SIG_IGN not handed down to a function's own programs
    signal.signal(signal.SIGCHLD, _nothing)
    os.setsid()
    for end in (bounds.commands, bounds.answers):
        os.set_inheritable(end, False)  # no business of a program that a function starts
    prctl.set_attribute(prctl.CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        prctl.set_attribute(prctl.PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
            os.setpgid(0, 0)  # a signal to its own group is none to the keeper
            # a MemoryError in Python, in this process and its children, each for itself
            set_limit(resource.RLIMIT_DATA, bounds.memory_limit_mb * MIB)
            _work(bounds, work)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    why, limit = _watch(worker, bounds)
    _end_all()
    if why:
        with contextlib.suppress(OSError):
            os.write(bounds.answers, protocol.last_words(bounds.key, why, limit))


def _work(bounds: Bounds, work: Callable[[Bounds], None]) -> None:
    """Runs `work`; what it raises ends this process here, and not in the frames that it was forked in."""
    try:
        work(bounds)
    except BaseException:  # noqa: BLE001 - a process of foreign code may raise anything
        traceback.print_exc(limit=-_SHOWN_FRAMES)
        os._exit(1)


def _watch(worker: int, bounds: Bounds) -> tuple[str, str]:
    """How the worker ended, or why it must, and the limit's name; "" once the parent is gone or closed its end."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)  # a child's end ends the wait below
    poll = select.poll()
    poll.register(bounds.commands, 0)  # that the other side is closed is told without being asked for
    poll.register(woken, select.POLLIN)
    pause_s = _LOOK_S
    while (status := _reap(worker)) is None:
        if os.getppid() != bounds.parent or bounds.commands in dict(poll.poll(pause_s * 1000)):
            return "", ""
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        start = time.monotonic()
        for limit, most in _exceeded(bounds):
            os.kill(worker, signal.SIGKILL)  # before what it waits for: it must not go on without that
            return f"with what it started it took more than {most}", limit
        pause_s = max(_LOOK_S, (time.monotonic() - start) / _LOOK_FRAC)
    return (f"signal {-status}" if status < 0 else f"exit status {status}"), ""


def _exceeded(bounds: Bounds) -> Iterator[tuple[str, str]]:
    """The limits that the worker and what it started exceed together."""
    if bounds.max_processes and len(psutil.Process().children(recursive=True)) > bounds.max_processes:
        yield "processes", f"{bounds.max_processes} processes"
    if bounds.memory_limit_mb and _memory_mb(bounds.memory_limit_mb) > bounds.memory_limit_mb:
        yield "memory", f"{bounds.memory_name}={bounds.memory_limit_mb}"


def _nothing(number: int, frame: FrameType | None) -> None:
    """For a signal that is not to end the process, or only to end a wait."""


def _reap(worker: int) -> int | None:
    """Collects processes that ended; the worker's status, negative for a signal, if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_all() -> None:
    """Kills everything that descends from this process, and what is started meanwhile."""
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


def _memory_mb(enough: float) -> float:
    """Of everything that descends from this process, MiB; what several share counts once where it comes to that."""
    found = psutil.Process().children(recursive=True)
    total = 0.0
    for exact in (False, True):
        total = 0.0
        for process in found:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss / MIB if exact else process.memory_info().rss / MIB
        if total <= enough or sys.platform != "linux":
            break
    return total
