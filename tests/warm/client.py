"""The program of `tests.warm.python`, see there. It imports nothing that takes time."""

import array
import json
import os
import resource
import signal
import socket
import sys

MODULES = (
    "mrl", "mrl.distributed.watchdog.torchrun", "acceptance.session", "tests.engines.trtllm.mpi_ranks",
    "tests.rollout.episodes.scripted",
    "tests.engines.trtllm.one_job", "tests.warm.shown",
)  # fmt: skip
WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""What xdist starts a worker of pytest with."""
READ_BY_IMPORTS = ("OMP_", "MKL_", "OPENBLAS_", "LD_", "HF_", "TORCH_LOGS", "LANG", "LC_", "CUDA_", "PYTHON")
"""With which the names of variables begin."""
GIVEN = ("PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHON", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES")
"""But these."""
NAMES = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM", "SIGCONT")
HANDED_ON = [getattr(signal, name) for name in NAMES]
LIMITS = range(16)
"""Of Linux, RLIMIT_CPU to RLIMIT_RTTIME."""


def main(words: list[str]) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    folder = os.path.dirname(os.path.abspath(__file__))
    rest = words[words[:1] == ["-u"] :]
    known = rest == WORKER or (rest[:1] == ["-m"] and rest[1] in MODULES)
    if not known or not suits(os.path.join(folder, "variables")):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *words])
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(folder, "socket"))
    ignored = [number for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if file != server.fileno() and is_open(file)]
    request = {
        "pid": os.getpid(), "words": words, "unbuffered": rest != words, "variables": dict(os.environ),
        "folder": os.getcwd(), "files": files, "ignored": ignored, "mask": sorted(mask), "umask": os.umask(0),
        "limits": [(number, *resource.getrlimit(number)) for number in LIMITS],
    }  # fmt: skip
    text = json.dumps(request).encode()
    numbers = array.array("i", files)
    server.sendmsg([len(text).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    server.sendall(text)
    for file in files:
        os.close(file)  # whoever reads of a pipe waits for the process alone
    for number in HANDED_ON:  # the process may hear by now what it ignored when it began
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    end(server.recv(4))


def suits(file: str) -> bool:
    """Whether a process with these variables would have imported what the server has."""
    with open(file) as stream:
        theirs = json.load(stream)
    root = theirs.pop("ROOT")
    return os.environ.get("PYTHONPATH", root).split(os.pathsep)[0] == root and read_by_imports() == theirs


def read_by_imports() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(READ_BY_IMPORTS) and k not in GIVEN}


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def end(told: bytes) -> None:
    """Ends as the process did."""
    if not told:
        os._exit(99)  # the server is gone, and the process with it
    status = int.from_bytes(told, "big")
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
