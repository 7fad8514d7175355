"""Runs an untrusted program, such as code that a model wrote, and returns what it printed.

The program is one process, confined by `landlock_seccomp.py`: it may change files in one folder, read Python and the
system's libraries and no other files, and has no network, no further processes, no environment variables, no signals to
others, and bounds of time, memory, threads, files and output. That needs Linux with Landlock and seccomp; `Ran.missing`
says what a machine lacks.

Where a user may make namespaces and bubblewrap is installed, the program also has its own view of the machine: no other
process, no other file. Inside a worker that is itself confined bubblewrap cannot start, and is not tried.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, wraps
from pathlib import Path
from typing import IO, Any

from mrl.distributed.worker_processes import prctl
from mrl.distributed.worker_processes.folders import BLOCK_BYTES, empty, owned_folder
from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine
from mrl.distributed.worker_processes.usage import Most, folder_problem, process_problem

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")
"""What programs are made of."""

_HOME = str(Path(__file__).resolve().parents[3])
_READ_BYTES = 1 << 16
_PROBE_LIMIT_S = 10.0
_START_LIMIT_S = 60.0  # for Python to start, on a busy machine
_EXIT_LIMIT_S = 5.0  # for a killed program to be gone
_LOOK_S = 0.05  # between two looks at what it takes
_LOOK_FRAC = 0.05  # of a core for them
_PAUSE_S = 0.001  # between two looks whether a program that closed its output has ended
_VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Libraries that start a thread on each core, and a C library that reserves memory for each, exceed the limits.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
}
_BOOT = (
    "import json, sys\n"
    "with open(int(sys.argv.pop())) as file: said = json.load(file)\n"
    "sys.path.insert(0, said['home'])\n"
    "from mrl.distributed.worker_processes.sandbox import enter; enter(said)"
)


@dataclass(frozen=True)
class Bounds:
    """What a program may take.

    Attributes:
        time_s: From when it is confined to its end, s: Python's own start is not counted.
        memory_mb: MiB.
        output_bytes: That it may print; then it is ended.
        file_mb: Largest file that it may write, MiB.
        folder_mb: All its files together, MiB on the disk.
        files: Number of files and folders in its folder.
        threads: Number of threads at one time.
    """

    time_s: float = 10.0
    memory_mb: int = 512
    output_bytes: int = 1 << 16
    file_mb: int = 16
    folder_mb: int = 64
    files: int = 2000
    threads: int = 256

    @property
    def most(self) -> Most:
        """The bounds that are looked at while the program runs."""
        return Most(self.threads, self.memory_mb, self.folder_mb, self.file_mb, self.files)


@dataclass(frozen=True)
class Ran:
    """What became of a program.

    Attributes:
        output: What it printed, on both streams, in its order; cut where it is too long.
        status: Its exit status, negative for the signal that ended it.
        problem: Why it was ended, "" where it ended by itself.
        missing: What it was not kept from on this machine, though it should be; [] where all of it holds.
    """

    output: str
    status: int
    problem: str
    missing: tuple[str, ...]


def run_python(
    code: str, folder: str, bounds: Bounds, bubblewrap: bool | None = None, *, stdin: str = "", then: str = ""
) -> Ran:
    """Runs Python code.

    Args:
        code: The whole program.
        folder: An existing folder, in which it starts and may write. What it leaves there stays, unless that is more
            than the bounds: then all of it is removed.
        bounds: Of this run.
        bubblewrap: Whether it runs inside bubblewrap too; None: where that works.
        stdin: Text of the program's standard input. Descriptor 0 is a regular file with it, as after `< file` in a
            shell, so every way to read it works.
        then: Python that runs after the program, in the same process and with its names. The process reads it when the
            program has ended, so it is in no frame or constant before. The program could still read it earlier, from
            the descriptor that holds it.

    Raises:
        RuntimeError: It did not start: none of the code ran.
    """
    inside = bubblewrap_works() if bubblewrap is None else bubblewrap
    reads, writes = os.pipe()
    with open(reads, "rb"):
        try:
            started, own_bytes = _start(code, folder, bounds, inside, stdin, then, writes)
        finally:
            os.close(writes)
        with started:
            try:
                line = _first_line(reads)
                ran = line.endswith(b"\n")
                output, problem = _read(started, folder, bounds, own_bytes) if ran else (b"", "")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # it was not waited for: no other process has its number
            status = started.wait(_EXIT_LIMIT_S)
    if not line.endswith(b"\n"):
        raise RuntimeError(f"a program did not start in the sandbox within {_START_LIMIT_S:g} s (status {status})")
    if found := folder_problem(folder, bounds.most):
        problem = problem or found
        empty(folder)
    missing = tuple(map(str, json.loads(line)))
    text = output[: bounds.output_bytes].decode(errors="replace")
    return Ran(text, status, problem, missing)


def _start(
    code: str, folder: str, bounds: Bounds, inside: bool, stdin: str, then: str, writes: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the program's process, and returns it with the size of the files that it is given, bytes on the disk.

    Raises:
        RuntimeError: It cannot be started.
    """
    with ExitStack() as stack:
        # in the folder: programs may open /dev/stdin, and Landlock allows that for files of their folder only
        given = stack.enter_context(_file_with(stdin, folder))
        after = [stack.enter_context(_file_with(then, folder))] if then else []
        said = {"home": _HOME, "folder": folder, "told": writes, "code": code, "bounds": asdict(bounds)}
        said["parent"] = None if inside else os.getpid()  # bubblewrap ends with its parent by itself
        said["then"] = after[0].fileno() if after else None
        boot = stack.enter_context(_file_with(json.dumps(said), folder))
        command = [*(_bubblewrap(folder) if inside else ()), sys.executable, "-I", "-c", _BOOT, str(boot.fileno())]
        try:
            started = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**_VARIABLES, "HOME": folder, "TMPDIR": folder},
                pass_fds=(writes, *(file.fileno() for file in (boot, *after))),
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"a program did not start in the sandbox: {error}") from error
        return started, sum(os.fstat(file.fileno()).st_blocks * BLOCK_BYTES for file in (given, boot, *after))


def enter(said: dict[str, Any]) -> None:
    """Confines this process, writes to the parent what that lacked, and runs the code."""
    bounds = Bounds(**said["bounds"])
    if said["parent"] is not None:
        prctl.set_attribute(prctl.PDEATHSIG, signal.SIGKILL)
        if os.getppid() != said["parent"]:
            os._exit(1)  # the parent died before
    sys.path.remove(said["home"])
    os.chdir(said["folder"])
    missing = confine(
        Confinement(
            writable=(said["folder"],),
            readable=(*SYSTEM, sys.prefix, sys.base_prefix),
            calls="program",
            memory_mb=bounds.memory_mb,
            file_mb=bounds.file_mb,
            cpu_s=math.ceil(bounds.time_s) + 1,
        )
    )
    os.write(said["told"], json.dumps(missing).encode() + b"\n")
    os.close(said["told"])
    os.chmod, os.utime = _tolerant(os.chmod, said["folder"]), _tolerant(os.utime, said["folder"])
    shutil.copymode = shutil.copystat = lambda *_, **__: None  # they copy extended attributes too
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(said["code"], "<code>", "exec"), names)
        if said["then"] is not None:
            with open(said["then"], encoding="utf-8") as file:
                exec(compile(file.read(), "<then>", "exec"), names)
    except Exception as error:  # noqa: BLE001 - told as Python tells it, without the frame above
        told = error.__traceback__
        traceback.print_exception(error.with_traceback(told.tb_next if told else None))
        sys.exit(1)


def _tolerant(change: Callable[..., None], folder: str) -> Callable[..., None]:
    """Returns a function that changes mode or times of a file, and does nothing where the file is in the folder.

    Linux cannot allow such changes in one folder only, so all are refused; many programs make some that do not matter.
    """
    base = os.path.realpath(folder)

    @wraps(change)
    def changed(path: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(path, int) or "dir_fd" in kwargs or not _is_in(base, path):
            change(path, *args, **kwargs)
        else:
            os.stat(path)  # a file that is not there is an error

    return changed


def _is_in(folder: str, path: Any) -> bool:
    return Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder)


def _file_with(text: str, folder: str) -> IO[str]:
    """A file without a name that holds a text, to be read from its start."""
    try:
        file = tempfile.TemporaryFile(  # noqa: SIM115 -- the caller closes it
            "w+", encoding="utf-8", errors="surrogatepass", newline="", dir=folder
        )
        file.write(text)
        file.seek(0)
    except OSError as error:
        raise RuntimeError(f"a program did not start in the sandbox: {error}") from error
    return file


@cache
def bubblewrap_works() -> bool:
    """Whether bubblewrap is installed and may make its namespaces here: it is asked to, once in a process."""
    if _bubblewrap_path() is None:
        return False
    with owned_folder("probe") as folder:
        try:
            done = subprocess.run(
                [*_bubblewrap(folder), sys.executable, "-I", "-c", ""], capture_output=True, timeout=_PROBE_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


@cache
def _bubblewrap_path() -> str | None:
    """Path of bubblewrap as this process finds it: the program's PATH is another one. None: it is not installed."""
    found = shutil.which("bwrap")
    return None if found is None else str(Path(found).absolute())


def _bubblewrap(folder: str) -> list[str]:
    path = _bubblewrap_path()
    if path is None:
        raise RuntimeError("bubblewrap is not installed: no 'bwrap' in PATH")
    shown = dict.fromkeys((*SYSTEM, sys.prefix, sys.base_prefix, f"{_HOME}/mrl"))
    places = [word for place in shown if not place.startswith("/dev/") for word in ("--ro-bind-try", place, place)]
    ends = ["--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--bind", folder, folder]
    return [path, *places, *ends, "--chdir", folder, "--"]


def _first_line(told: int) -> bytes:
    """What the program's process says once it is confined; no whole line where it ends or hangs before."""
    line, end = b"", time.monotonic() + _START_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, end - time.monotonic())):
            found = os.read(told, _READ_BYTES)
            line += found
            if not found:
                break
    return line


def _read(started: subprocess.Popen[bytes], folder: str, bounds: Bounds, own_bytes: int) -> tuple[bytes, str]:
    """Returns what it printed until it ended, and why it must end before, "" where it ended by itself.

    It is not waited for: until then no other process gets its number, so that it can still be killed.
    """
    if started.stdout is None:
        raise RuntimeError("the program has no output")
    output, end, most = bytearray(), time.monotonic() + bounds.time_s, bounds.most
    look = time.monotonic() + _LOOK_S
    with selectors.DefaultSelector() as selector:
        selector.register(started.stdout, selectors.EVENT_READ)
        while selector.get_map() or not _has_ended(started.pid):
            now = time.monotonic()
            if now >= end:
                return bytes(output), f"it took longer than {bounds.time_s:g} s"
            if now >= look:
                if problem := process_problem(started.pid, most, own_bytes) or folder_problem(folder, most):
                    return bytes(output), problem
                look = time.monotonic() + max(_LOOK_S, (time.monotonic() - now) / _LOOK_FRAC)
            pause = max(0.0, min(end, look) - time.monotonic())
            if not selector.get_map():
                time.sleep(min(pause, _PAUSE_S))
            elif selector.select(pause):
                found = os.read(started.stdout.fileno(), _READ_BYTES)
                output += found
                if not found:
                    selector.unregister(started.stdout)
                if len(output) > bounds.output_bytes:
                    return bytes(output), f"it printed more than {bounds.output_bytes} bytes"
    return bytes(output), ""


def _has_ended(pid: int) -> bool:
    """Returns whether a child has ended, and does not wait for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
