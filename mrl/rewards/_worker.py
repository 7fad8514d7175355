"""The worker process: scores samples that its parent sends, one after the other.

Started by `_pool.py` as a fresh interpreter. It imports no torch and nothing of the parent's main module. It ends when
its parent does: at the end of the pipe, or, where a reward function hangs, by the kernel's signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from mrl.errors import UserError
from mrl.rewards._call import IGNORED, RewardCall

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Speaks on the inherited file descriptor argv[1]; argv[2] is the parent's process id.

    In: a list of (name, kwargs), then lists of `Sample`. Out: "" when ready, or why not; then for each sample its list
    of `Outcome`, as soon as it is known.
    """
    for number in IGNORED:  # the parent's; it ends this process by closing the pipe
        signal.signal(number, lambda number, frame: None)  # unlike SIG_IGN not handed down to a function's own programs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    pipe = Connection(int(sys.argv[1]))
    try:
        calls = [_load(name, kwargs) for name, kwargs in pipe.recv()]
    except UserError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    while True:
        for sample in pipe.recv():
            pipe.send([call(sample) for call in calls])


def _load(name: str, kwargs: dict[str, Any]) -> RewardCall:
    try:
        return RewardCall(name, kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward.functions: '{name}' does not import: {type(error).__name__}: {error}.") from error


def run() -> None:
    """`main` until the parent closes the pipe."""
    try:
        main()
    except (EOFError, ConnectionError):
        sys.exit(0)
