"""`python -m mrl.distributed.torchrun ...`: torchrun, which says nothing where a rank has said what went wrong.

Owns the exit status of the launcher, and the signals that it hands on. torchrun ends each failure with a traceback of
its own code and a table of exit codes. Where the first rank that failed ended with one of mrl's own statuses, its
message is on the terminal already: the traceback is left out, and the status becomes the launcher's. After every other
ending (a defect, a signal, no memory) torchrun's table stays as it is, with its status 1.

SIGUSR1 and SIGTERM go to the ranks, which stop in order (`stop.py`) and whose status is then the launcher's. torchrun
alone would die of SIGUSR1 and leave its ranks behind, and send SIGKILL 30 s after SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from mrl.distributed.stop import REPEAT_S, REQUEUE, SIGNALS

TOLD = (2, REQUEUE, 130, 143)
"""Statuses of `mrl` that come with a message, see `mrl/cli.py`."""

LAST_S = 5.0
"""Ranks that live so long after a second SIGTERM are killed."""

LOOK_S = 0.1
"""Between two looks whether there are ranks yet."""


def main() -> int:
    """Runs torchrun on the command line's arguments and returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # in the ranks too: what comes before they can hear it waits
    threading.Thread(target=_hand_on, name="signals", daemon=True).start()
    try:
        torchrun()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in TOLD:
            raise
        return int(failure.exitcode)
    except SignalException as stop:  # the ranks were sent the same signal, and have ended
        return 128 + int(stop.sigval)
    return 0


def _hand_on() -> None:
    first_term: float | None = None
    while True:
        number = signal.sigwait(SIGNALS)
        ranks = psutil.Process().children()
        while not ranks:
            if signal.SIGTERM in (number, *signal.sigpending()):
                sys.stderr.write("mrl: ended by SIGTERM before there were ranks.\n")
                sys.stderr.flush()
                os._exit(REQUEUE)
            time.sleep(LOOK_S)
            ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if number != signal.SIGTERM:
            continue
        first_term = first_term or time.monotonic()
        if time.monotonic() - first_term > REPEAT_S:
            time.sleep(LAST_S)  # psutil's own wait would take the ranks' status away from torchrun
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()


if __name__ == "__main__":
    sys.exit(main())
