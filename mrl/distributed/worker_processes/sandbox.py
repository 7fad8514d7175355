"""Runs an untrusted program, such as code that a model wrote, and returns what it printed.

The program is one process, confined by `landlock_seccomp.py`. It may change files in one folder and read only Python
and the system's libraries. It has no network, child processes, inherited environment variables or signals to other
processes, and limits of time, memory, threads, files and output. This needs Linux with Landlock and seccomp;
`SandboxResult.missing` lists the parts that a machine does not support.

If bubblewrap is installed and the user may create namespaces, the program also sees no other processes and files.
Bubblewrap cannot start inside a worker that is itself confined, and is not tried there.
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
from mrl.distributed.worker_processes.folders import BLOCK_BYTES, empty, temporary_folder
from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine
from mrl.distributed.worker_processes.usage import UsageLimits, folder_problem, process_problem

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")
"""Files and folders that every program may read: system libraries, time zone, random devices."""

_HOME = str(Path(__file__).resolve().parents[3])
_READ_BYTES = 1 << 16
_PROBE_LIMIT_S = 10.0
_START_LIMIT_S = 60.0  # for Python to start, on a busy machine
_EXIT_LIMIT_S = 5.0  # for a killed program to disappear
_SAMPLE_S = 0.05  # interval between two measurements of resource usage
_SAMPLE_FRAC = 0.05  # largest share of a core that the measurements use
_PAUSE_S = 0.001  # poll interval for the end of a program that closed its output
_VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # One thread per core, and malloc's arena per thread, would exceed the limits.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
}
_BOOT = (
    "import json, sys\n"
    "with open(int(sys.argv.pop())) as file: setup = json.load(file)\n"
    "sys.path.insert(0, setup['home'])\n"
    "from mrl.distributed.worker_processes.sandbox import enter; enter(setup)"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of a program.

    Attributes:
        time_s: Wall time of the confined program, s; Python's start-up does not count.
        memory_mb: Memory of the process, MiB.
        output_bytes: Size of the printed output after which the program is killed, bytes.
        file_mb: Largest file that it may write, MiB.
        folder_mb: All files in its folder together, MiB on disk.
        files: Number of files and folders in its folder.
        threads: Number of simultaneous threads.
    """

    time_s: float = 10.0
    memory_mb: int = 512
    output_bytes: int = 1 << 16
    file_mb: int = 16
    folder_mb: int = 64
    files: int = 2000
    threads: int = 256

    @property
    def sampled(self) -> UsageLimits:
        """Limits that are enforced by sampling while the program runs."""
        return UsageLimits(self.threads, self.memory_mb, self.folder_mb, self.file_mb, self.files)


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program.

    Attributes:
        output: Printed text, standard output and standard error interleaved; cut at `output_bytes`.
        status: Exit status; negative for the signal that killed it.
        problem: Limit that it exceeded, in words; "" if it ended by itself.
        missing: Parts of the confinement that this machine does not support; () if all are in effect.
    """

    output: str
    status: int
    problem: str
    missing: tuple[str, ...]


def run_python(
    code: str, folder: str, bounds: SandboxLimits, bubblewrap: bool | None = None, *, stdin: str = "", then: str = ""
) -> SandboxResult:
    """Runs Python code.

    Args:
        code: Source of the program.
        folder: Existing folder, the program's working directory and the only writable one. Its files stay, unless they
            exceed the limits: then all are removed.
        bounds: Resource limits of this run.
        bubblewrap: True to also run inside bubblewrap; None to do so if it works.
        stdin: Text of the program's standard input. Descriptor 0 is a regular file with it, as after `< file` in a
            shell, so every way to read it works.
        then: Python that runs after the program, in the same process and namespace. The process reads it when the
            program has ended, so no earlier frame or constant contains it. The program could still read it earlier,
            from its file descriptor.

    Raises:
        RuntimeError: The process did not start; none of the code ran.
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
                line = _read_report(reads)
                ran = line.endswith(b"\n")
                output, problem = _read(started, folder, bounds, own_bytes) if ran else (b"", "")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # not reaped yet, so no other process has this pid
            status = started.wait(_EXIT_LIMIT_S)
    if not line.endswith(b"\n"):
        raise RuntimeError(f"a program did not start in the sandbox within {_START_LIMIT_S:g} s (status {status})")
    if found := folder_problem(folder, bounds.sampled):
        problem = problem or found
        empty(folder)
    missing = tuple(map(str, json.loads(line)))
    text = output[: bounds.output_bytes].decode(errors="replace")
    return SandboxResult(text, status, problem, missing)


def _start(
    code: str, folder: str, bounds: SandboxLimits, inside: bool, stdin: str, then: str, writes: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the program's process; returns it and the size of its input files, bytes on disk."""
    with ExitStack() as stack:
        # in the folder, because Landlock lets programs open /dev/stdin only if it is a file of their folder
        given = stack.enter_context(_file_with(stdin, folder))
        after = [stack.enter_context(_file_with(then, folder))] if then else []
        setup = {"home": _HOME, "folder": folder, "report_fd": writes, "code": code, "bounds": asdict(bounds)}
        setup["parent"] = None if inside else os.getpid()  # bubblewrap ends with its parent by itself
        setup["then"] = after[0].fileno() if after else None
        boot = stack.enter_context(_file_with(json.dumps(setup), folder))
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


def enter(setup: dict[str, Any]) -> None:
    """Confines this process, reports unsupported parts of the confinement to the parent, and runs the code."""
    bounds = SandboxLimits(**setup["bounds"])
    if setup["parent"] is not None:
        prctl.set_attribute(prctl.PDEATHSIG, signal.SIGKILL)
        if os.getppid() != setup["parent"]:
            os._exit(1)  # the parent ended before PDEATHSIG was set
    sys.path.remove(setup["home"])
    os.chdir(setup["folder"])
    missing = confine(
        Confinement(
            writable=(setup["folder"],),
            readable=(*SYSTEM, sys.prefix, sys.base_prefix),
            calls="program",
            memory_mb=bounds.memory_mb,
            file_mb=bounds.file_mb,
            cpu_s=math.ceil(bounds.time_s) + 1,
        )
    )
    os.write(setup["report_fd"], json.dumps(missing).encode() + b"\n")
    os.close(setup["report_fd"])
    os.chmod, os.utime = _tolerant(os.chmod, setup["folder"]), _tolerant(os.utime, setup["folder"])
    shutil.copymode = shutil.copystat = lambda *_, **__: None  # they copy extended attributes too
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(setup["code"], "<code>", "exec"), names)
        if setup["then"] is not None:
            with open(setup["then"], encoding="utf-8") as file:
                exec(compile(file.read(), "<then>", "exec"), names)
    except Exception as error:  # noqa: BLE001 - printed as Python prints it, without this frame
        frames = error.__traceback__
        traceback.print_exception(error.with_traceback(frames.tb_next if frames else None))
        sys.exit(1)


def _tolerant(change: Callable[..., None], folder: str) -> Callable[..., None]:
    """Wraps a function that changes a file's mode or times, so that it does nothing for files in the folder.

    Linux cannot allow such changes in one folder only, so seccomp refuses all of them. Many programs make changes whose
    effect does not matter.
    """
    base = os.path.realpath(folder)

    @wraps(change)
    def changed(path: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(path, int) or "dir_fd" in kwargs or not _is_in(base, path):
            change(path, *args, **kwargs)
        else:
            os.stat(path)  # raises if the file does not exist

    return changed


def _is_in(folder: str, path: Any) -> bool:
    return Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder)


def _file_with(text: str, folder: str) -> IO[str]:
    """Returns an unnamed file with a text, positioned at its start."""
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
    """Returns whether bubblewrap is installed and can create its namespaces; tried once per process."""
    if _bubblewrap_path() is None:
        return False
    with temporary_folder("probe") as folder:
        try:
            done = subprocess.run(
                [*_bubblewrap(folder), sys.executable, "-I", "-c", ""], capture_output=True, timeout=_PROBE_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


@cache
def _bubblewrap_path() -> str | None:
    """Returns the path of bubblewrap in this process's PATH, which is not the program's; None if not installed."""
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


def _read_report(report_fd: int) -> bytes:
    """Reads the line that `enter` writes once confined; incomplete if the process ends or hangs before."""
    line, end = b"", time.monotonic() + _START_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(report_fd, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, end - time.monotonic())):
            found = os.read(report_fd, _READ_BYTES)
            line += found
            if not found:
                break
    return line


def _read(started: subprocess.Popen[bytes], folder: str, bounds: SandboxLimits, own_bytes: int) -> tuple[bytes, str]:
    """Reads the output until the program ends or exceeds a limit; returns the output and that limit, "" for none.

    Does not reap the process: until then no other process gets its pid, so the caller can still kill it.
    """
    if started.stdout is None:
        raise RuntimeError("the program has no output")
    output, end, sampled = bytearray(), time.monotonic() + bounds.time_s, bounds.sampled
    next_sample = time.monotonic() + _SAMPLE_S
    with selectors.DefaultSelector() as selector:
        selector.register(started.stdout, selectors.EVENT_READ)
        while selector.get_map() or not _has_ended(started.pid):
            now = time.monotonic()
            if now >= end:
                return bytes(output), f"it took longer than {bounds.time_s:g} s"
            if now >= next_sample:
                if problem := process_problem(started.pid, sampled, own_bytes) or folder_problem(folder, sampled):
                    return bytes(output), problem
                next_sample = time.monotonic() + max(_SAMPLE_S, (time.monotonic() - now) / _SAMPLE_FRAC)
            pause = max(0.0, min(end, next_sample) - time.monotonic())
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
    """Returns whether a child process has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
