"""`python -m tests.warm.shown WORD ...`: prints what a process has from whoever started it, and does what WORD says."""

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from tests.warm.client import is_open


def state():
    numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    umask = os.umask(0)
    os.umask(umask)
    return {
        "words": sys.argv[1:], "typed": sys.orig_argv[1:], "file": sys.argv[0],
        "program": sys.executable, "path": sys.path, "name": __name__,
        "variables": {key: value for key, value in sorted(os.environ.items()) if key != "LC_CTYPE"},
        "folder": os.getcwd(), "umask": umask, "parent": os.getppid(), "host": socket.gethostname(),
        "files": {file: os.readlink(f"/proc/self/fd/{file}") for file in range(50) if is_open(file)},
        "limits": [resource.getrlimit(number) for number in range(16)],
        "signals": {number: str(signal.getsignal(number)).partition(" at ")[0] for number in numbers},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "input": sys.stdin.read(),
        "streams": [(stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
                    for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "network": os.readlink("/proc/self/ns/net"), "garbage": gc.isenabled(), "threads": threading.active_count(),
        "imported": "mrl.train" in sys.modules, "own": threading.main_thread().native_id == os.getpid(),
    }  # fmt: skip


if __name__ == "__main__":
    if "wait" in sys.argv:
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
        Path(sys.argv[2]).write_text(str(os.getpid()))
        time.sleep(600)
    if "raise" in sys.argv:
        raise ArithmeticError("planted")
    sys.stdout.write(json.dumps(state()))
    sys.exit(7)
