"""One process of a test session that has imported what its tests need; whatever they fork is forked from it.

    pid = fork("tests.ranks:serve", [file, ...], argument, ...)   # serve(number of the file there, ..., argument, ...)

pytest's controller starts it and tells the workers where it listens, so that imports are done once, when the first of
them asks. What needs more modules is forked from a process of its own that has imported them, too, also once. All of
these end with the process that started the first one, even by kill -9; what they forked ends when it wants to.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from mrl.distributed.local_ranks import TOKENIZERS, TRAINING
from tests.source import ROOT

PRELOAD = [
    *TRAINING, TOKENIZERS, "tests.first_run", "pytest",
    "mrl.commands.cli", "mrl.distributed.watchdog.torchrun_agent", "mrl.commands.doctor.doctor",
    "acceptance.checks",
]  # fmt: skip
QUIET = ("ignore", None, Warning, None, 0)
"""A filter of warnings: there it is the first."""
MOST_FILES = 8
END_S = 30
SESSION = 499
"""There: the number of a file that ends with the process that started the first one."""
_folder: list[Path] = []


def folder() -> Path:
    """Where the process listens, which the first call starts."""
    if not _folder:
        use(tempfile.mkdtemp(prefix="mrl-imports-"))  # not in a test's: a socket's name has at most 107 characters
        with _listening(()) as listener:
            code = f"from tests import imports; imports.main({listener.fileno()}, {PRELOAD})"
            process = subprocess.Popen(
                [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
                # a process that has begun to use a GPU must not fork
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )  # fmt: skip
        assert process.stdin is not None
        atexit.register(process.wait, END_S)
        atexit.register(process.stdin.close)
    return _folder[0]


def use(place: str) -> None:
    """Makes `fork` ask the process that another one of this session started there."""
    _folder.append(Path(place))


def fork(function: str, files: Sequence[int], *arguments: Any, modules: Sequence[str] = ()) -> int:
    """Calls `module:function` in a process of its own that has imported these modules, too; its number.

    Of this process it has the files that are named, standard output and standard error; no variables, no folder.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_place(modules))
        reduction.sendfds(connection, [*files, 1, 2])
        connection.sendall(pickle.dumps((function, arguments)))
        connection.shutdown(socket.SHUT_WR)
        return int(connection.makefile().read())


def _place(modules: Sequence[str]) -> str:
    """Of the socket where a process with these modules listens."""
    if modules:
        with (folder() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _socket(modules).exists():
                with _listening(modules) as listener:
                    fork("tests.imports:serve", [listener.fileno()], modules)
    return str(folder() / _socket(modules))


def _socket(modules: Sequence[str]) -> Path:
    return folder() / "-".join(("socket", *modules))


def _listening(modules: Sequence[str]) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(_socket(modules)))
    listener.listen(64)
    return listener


def main(listener: int, modules: Sequence[str]) -> None:
    """The first process's life."""
    os.dup2(0, SESSION, inheritable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    select.select([listener, SESSION], [], [])
    atexit.register(_end)  # before all others: it is called after them
    gc.disable()  # what is imported is no garbage, and much to look through
    warnings.filters.insert(0, QUIET)
    serve(listener, modules)


def _end() -> None:
    """Spares a process that ends 0.3 s of a processor: to take apart all that was imported."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(sys.modules.values())))
    sys.modules.clear()
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc._exit, None)  # before what libraries in C++ do then


def serve(listener: int, modules: Sequence[str]) -> None:
    """Imports, and forks for whoever asks; in each process that was forked it does what that is for."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that ended
    asked = socket.socket(fileno=listener)
    while True:
        ready, _, _ = select.select([asked, SESSION], [], [])
        if SESSION in ready:
            shutil.rmtree(Path(asked.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        connection, _ = asked.accept()
        try:
            files = reduction.recvfds(connection, MOST_FILES)
            with connection.makefile("rb") as stream:
                function, arguments = pickle.load(stream)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):  # who asked was killed
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            break
        connection.sendall(str(pid).encode())
        connection.close()
        for file in files:
            os.close(file)
    asked.close()
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (2, 1):
        file = files.pop()
        os.dup2(file, number)
        os.close(file)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*files, *arguments)
