"""The parent's end of a worker process: starts it under a supervisor, exchanges messages with it, and ends it.

The pipes are non-blocking, so a worker that hangs never blocks the parent. Callers validate the messages' contents.
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
"""Time limit of a worker's imports, s; users' code may import large packages."""

MALFORMED: dict[str, Any] = {}
"""Stands for a line that neither the worker nor the supervisor wrote."""

_EXIT_LIMIT_S = 5.0  # from closing the pipes to the end of the processes
_READ_BYTES = 1 << 16
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import run; run()"


class Channel:
    """Pipes to a worker process and its supervisor.

    Attributes:
        process: Process of the supervisor, the worker's parent.
        closed: True if the other side of the pipe is closed: worker and supervisor have ended.
        started: Start time, monotonic s.
    """

    def __init__(self, module: str, *, memory_limit_mb: int, memory_name: str, max_processes: int = 0) -> None:
        """Starts the processes.

        Args:
            module: Module whose `run` calls `worker_main.run_worker`; imported by a fresh interpreter without the
                parent's main module.
            memory_limit_mb: Memory limit of the worker and its descendants together, MiB; 0: unlimited.
            memory_name: Config key of the memory limit, for messages.
            max_processes: Number of simultaneous processes, the worker and its descendants; 0: unlimited.
        """
        self._key = secrets.randbits(63)
        commands, self._to = os.pipe()
        self._answers, back = os.pipe()
        # Schedulers signal every process of a job. Blocks these signals until the supervisor can ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            args = SupervisorArgs(memory_name, os.getpid(), commands, back, memory_limit_mb, self._key, max_processes)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(module=module), *args.arguments(), json.dumps(sys.path)],
                pass_fds=(commands, back),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard error: prints of foreign code must not mix with the parent's output
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
        """Queues a message and writes as much as possible without blocking."""
        self._unsent += protocol.command(message)
        self.transfer()

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message of the worker or its supervisor; MALFORMED for other lines, None for no message."""
        while True:
            end = self._unread.find(b"\n")
            if end < 0:
                self.transfer()
                end = self._unread.find(b"\n")
            if end < 0:
                return MALFORMED if len(self._unread) > protocol.MAX_LINE_BYTES else None
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]
            if line:
                found = protocol.read(line, self._key)
                return MALFORMED if found is None else found

    def silent(self) -> bool:
        """Returns whether the worker is alive and has sent nothing that was not received."""
        self.transfer()
        return not (self.closed or self._unread or self.process.poll() is not None)

    @property
    def has_line(self) -> bool:
        """True if a complete line is buffered, which a selector on the pipe does not report."""
        return b"\n" in self._unread

    def transfer(self) -> None:
        """Writes and reads as much as possible without blocking."""
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
        """Registers the pipes for reading, and for writing if messages are queued."""
        selector.register(self._answers, selectors.EVENT_READ)
        if self._unsent:
            selector.register(self._to, selectors.EVENT_WRITE)

    def release(self) -> None:
        """Closes the pipes, whereupon the worker and its descendants end."""
        if not self._released:
            os.close(self._to)
            os.close(self._answers)
        self._released = True

    def stop(self) -> None:
        """Closes the pipes and waits until the processes have ended."""
        self.release()
        try:
            self.process.wait(timeout=_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for(channels: Iterable[Channel], seconds: float) -> None:
    """Waits until a worker may have sent a message or accepts input, or until the time is over."""
    channels = list(channels)
    if any(channel.has_line for channel in channels):
        return
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            channel.register(selector)
        selector.select(max(0.0, seconds))
