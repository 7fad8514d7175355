"""Forks itself for the programs of `tests.warm.python`, see there."""

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import platform
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import warnings
from pathlib import Path

from tests.imports import QUIET
from tests.source import ROOT
from tests.warm.client import read_by_imports

MOST_FILES = 250
HIGH = 500
"""No process here has a file of this number."""
SPACES = ("net", "uts", "mnt")
PR_SET_PDEATHSIG = 1


class Server:
    """What runs, and for whom."""

    def __init__(self, listener: int, alive: int) -> None:
        self.listener, self.alive = socket.socket(fileno=listener), alive
        self.asking: dict[int, tuple[socket.socket, int]] = {}  # by the number of the connection's file: a process
        self.running: dict[int, int] = {}  # by the number of the process's file: that of the connection's
        self.poll = select.poll()
        for file in (alive, listener):
            self.poll.register(file, select.POLLIN)

    def serve(self) -> dict:
        """Serves until `alive` ends; returns in each process that was forked, with what was asked for."""
        while True:
            # One event of each poll: handling it may close files, and a new file may get the number of a closed one, so
            # that the next event would be taken for that of the new file.
            file, _ = self.poll.poll()[0]
            if file == self.alive:
                for _, pid in self.asking.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if file == self.listener.fileno():
                if (request := self.fork()) is not None:
                    return request
            elif file in self.running:
                self.ended(file)
            else:
                self.hand_on(file)

    def fork(self) -> dict | None:
        """Starts what the next program asks for; there what that is, here None."""
        connection, _ = self.listener.accept()
        request, files = received(connection)
        if request is None:
            connection.close()
            return None
        threads = [Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")]
        assert len(threads) == 1, threads  # a process with threads must not fork
        request["server"] = os.getpid()
        pid = os.fork()
        if pid == 0:
            for each in (self.listener, connection, *(other for other, _ in self.asking.values())):
                each.detach()  # or it would close what has its number from now on
            put_in_place(request["files"], files)
            return request
        for file in files:
            os.close(file)
        process = os.pidfd_open(pid)
        self.asking[connection.fileno()], self.running[process] = (connection, pid), connection.fileno()
        for file in (connection.fileno(), process):
            self.poll.register(file, select.POLLIN)
        return None

    def ended(self, process: int) -> None:
        connection, pid = self.asking.pop(self.running.pop(process))
        _, status = os.waitpid(pid, 0)
        self.poll.unregister(process)
        with contextlib.suppress(KeyError):
            self.poll.unregister(connection)
        os.close(process)
        with contextlib.suppress(OSError):  # it was killed
            connection.sendall(status.to_bytes(4, "big"))
        connection.close()

    def hand_on(self, file: int) -> None:
        connection, pid = self.asking[file]
        try:
            numbers = connection.recv(100, socket.MSG_DONTWAIT)
        except OSError:
            numbers = b""
        for number in numbers:
            os.kill(pid, number)
        if not numbers:  # the program was killed
            os.kill(pid, signal.SIGKILL)
            self.poll.unregister(file)


def received(connection: socket.socket) -> tuple[dict | None, list[int]]:
    """What a program asks for, None where it was killed, and its files."""
    files, text = array.array("i"), b""
    try:
        head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(MOST_FILES * files.itemsize))
        for _, _, data in ancillary:
            files.frombytes(data)
        length = int.from_bytes(head, "big")
        while len(text) < length and (more := connection.recv(length - len(text))):
            text += more
        return json.loads(text), list(files)
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        return None, []


def put_in_place(numbers: list[int], files: list[int]) -> None:
    """Gives the files the numbers that they have in the program, and closes all others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    os.closerange(0, HIGH)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def become(request: dict) -> list[str]:
    """Makes this process what was asked for, all but its work; the words that say what that is."""
    libc, pid = ctypes.CDLL(None, use_errno=True), request["pid"]
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["server"]:
        os._exit(99)
    os.setsid()
    os.getppid = functools.partial(parent, pid)
    threading.main_thread()._set_native_id()  # Python forgets to
    pairs = [(f"/proc/self/ns/{name}", f"/proc/{pid}/ns/{name}") for name in SPACES]
    for space in [os.open(theirs, os.O_RDONLY) for own, theirs in pairs if os.readlink(own) != os.readlink(theirs)]:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for number, soft, hard in request["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.path[:3] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    tempfile.tempdir = platform._uname_cache = None
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if request["unbuffered"] or os.environ.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            old = getattr(sys, name)
            new = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), old.encoding, old.errors, write_through=True)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    gc.enable()  # what was imported stays frozen: it is no garbage when the process ends, either
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    words = request["words"]
    sys.orig_argv[1:] = words
    return words[request["unbuffered"] :]


def parent(pid: int) -> int:
    """The parent of the program; 1: it has none any more."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def serve(listener: int, alive: int, variables: str) -> None:
    """Serves; in each process that was forked it runs what was asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    warnings.filters.remove(QUIET)
    # torchrun reads its stack again and again; a file that is not known is looked for in all the modules imported here
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"
    Path(variables).write_text(json.dumps({**read_by_imports(), "ROOT": str(ROOT)}))
    server = Server(listener, alive)
    os.write(alive, b"r")
    kind, *words = become(server.serve())
    if kind == "-c":
        sys.argv[:] = [kind, *words[1:]]
        exec(words[0], vars(sys.modules["__main__"]))
    else:
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
