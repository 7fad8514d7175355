"""A Python that has imported mrl already, for tests that start many processes of it: for sys.executable `python()`.

    subprocess.run([warm.python(), "-m", "mrl", "train", ...])          # or PYTHON and PYTHON_EXEC of a launcher

The program (`client.py`) asks a server of this test process (`server.py`), which is forked from the one that has done
the session's imports (`tests/imports.py`), to fork the process: with the program's arguments, variables, folder, open
files, limits, ignored and blocked signals, hostname and network. It hands signals on, ends as the process ends, and the
process is killed with it; to what the process runs its parent is the program's. What it cannot give so it becomes
itself, by the real Python: other modules and flags, and variables that imports read.

Not for tests of imports, of signals in the first second or of stopped processes (SIGSTOP). In a tree of processes there
is the program alone: the process is a child of the server, `processes()` has it. Each launcher has tests with
`sys.executable`, too.
"""

import atexit
import functools
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil

from tests import imports

END_S = 30
_servers: list[int] = []


@functools.cache
def python(*modules: str) -> str:
    """The program; its server, which has imported these modules, too, starts now and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-warm-"))  # not in a test's: a socket's name has at most 107 characters
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).with_name("client.py").read_text())
    program.chmod(0o755)
    ours, theirs = socket.socketpair()  # it ends when this process does
    with socket.socket(socket.AF_UNIX) as listener, theirs:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        files = (listener.fileno(), theirs.fileno())
        server = imports.fork("tests.warm.server:serve", files, str(folder / "variables"), modules=modules)
    atexit.register(psutil.Process(server).wait, END_S)
    atexit.register(ours.close)
    assert ours.recv(1) == b"r"  # it is ready
    _servers.append(server)
    return str(program)


def processes() -> list[psutil.Process]:
    """Those that were forked for programs of this test process and run now, and what they started."""
    return [process for server in _servers for process in psutil.Process(server).children(recursive=True)]
