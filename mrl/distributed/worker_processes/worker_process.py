"""The parent's end of a worker process: starting it with its keeper, writing to it, reading from it, ending it.

Nothing here waits for a worker without a limit: both ends of its pipes are read and written only as far as they go.
Whether what it says is an answer is the business of whoever asked.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.distributed.worker_processes.supervisor import IGNORED, SupervisorArgs

STARTUP_LIMIT_S = 120.0
"""Imports of a worker may take this long: foreign code may import large packages."""

NONSENSE: dict[str, Any] = {}
"""What a line says that the worker cannot have written."""

_EXIT_LIMIT_S = 5.0  # from a closed pipe to the end of its processes
_READ_BYTES = 1 << 16
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import run; run()"


class Channel:
    """One worker process with its keeper.

    Attributes:
        process: The keeper.
        closed: The other side has closed its end: worker and keeper are gone.
        started: Monotonic s.
    """

    def __init__(self, module: str, *, memory_limit_mb: int, memory_name: str, max_processes: int = 0) -> None:
        """Starts the processes.

        Args:
            module: Its `run` reads `SupervisorArgs` from the command line and calls `keeper.keep`; imported by a fresh
                interpreter that has nothing of the parent's main module.
            memory_limit_mb: For the worker and all that it starts, MiB; 0: none.
            memory_name: How the user calls that limit.
            max_processes: That the worker and what it starts may be at one time; 0: any number.
        """
        self._key = secrets.randbits(63)
        commands, self._to = os.pipe()
        self._answers, back = os.pipe()
        # A scheduler signals every process of the job. Until the keeper can ignore it, the signal waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            args = SupervisorArgs(memory_name, os.getpid(), commands, back, memory_limit_mb, self._key, max_processes)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(module=module), *args.arguments(), json.dumps(sys.path)],
                pass_fds=(commands, back),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what foreign code prints must not mix with the parent's output
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(commands)
            os.close(back)
        os.set_blocking(self._to, False)
        os.set_blocking(self._answers, False)
        self.closed = False
        self.started = time.monotonic()
        self._unsent = bytearray()
        self._unread = bytearray()
        self._released = False

    def send(self, message: object) -> None:
        """Queues a message, and writes what goes without waiting."""
        self._unsent += protocol.command(message)
        self.transfer()

    def receive(self) -> dict[str, Any] | None:
        """The next thing that the worker or its keeper said, NONSENSE where it was neither; None: nothing yet."""
        while True:
            end = self._unread.find(b"\n")
            if end < 0:
                self.transfer()
                end = self._unread.find(b"\n")
            if end < 0:
                return NONSENSE if len(self._unread) > protocol.MAX_LINE_BYTES else None
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]
            if line:
                found = protocol.read(line, self._key)
                return NONSENSE if found is None else found

    def silent(self) -> bool:
        """Whether it lives, and has said nothing that was not received."""
        self.transfer()
        return not (self.closed or self._unread or self.process.poll() is not None)

    @property
    def has_line(self) -> bool:
        """Whether `receive` has something that was read already: no selector tells of it."""
        return b"\n" in self._unread

    def transfer(self) -> None:
        """Writes and reads what goes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        try:
            while len(self._unread) <= protocol.MAX_LINE_BYTES:
                found = os.read(self._answers, _READ_BYTES)
                if not found:
                    self.closed = True
                    break
                self._unread += found
        except BlockingIOError:
            pass

    def register(self, selector: selectors.BaseSelector) -> None:
        """For what may happen next."""
        selector.register(self._answers, selectors.EVENT_READ)
        if self._unsent:
            selector.register(self._to, selectors.EVENT_WRITE)

    def release(self) -> None:
        """Closes the pipes, upon which the worker and everything that it started end."""
        if not self._released:
            os.close(self._to)
            os.close(self._answers)
        self._released = True

    def stop(self) -> None:
        """Returns when they have ended."""
        self.release()
        try:
            self.process.wait(timeout=_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for(channels: Iterable[Channel], seconds: float) -> None:
    """Returns when one of the workers may have said something or takes in something, or after that time."""
    channels = list(channels)
    if any(channel.has_line for channel in channels):
        return
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            channel.register(selector)
        selector.select(max(0.0, seconds))
