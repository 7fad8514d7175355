"""`python -m mrl.distributed.watchdog.torchrun ...`: torchrun as mrl wants it, see `torchrun_agent.py`.

Owns the first moment: what is handed on to the ranks is blocked before a library is imported that starts threads. The
kernel gives a signal to any thread that has it not blocked, and such a thread would let the launcher die without its
ranks.
Until torchrun hands Ctrl-C on to the ranks it ends this process at once.
"""

from __future__ import annotations

import signal
import sys

from mrl.distributed.watchdog import gc_control, signals

HANDED_ON = {signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM}
"""Signals that are requests to the ranks."""


def main() -> int:
    """Runs torchrun on the command line's arguments and returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # in the ranks too: what comes before they can hear it waits
    signals.begin_interrupts()
    with gc_control.quick_imports():
        from mrl.distributed.watchdog import torchrun_agent
    try:
        with gc_control.frozen_imports():
            return torchrun_agent.run(sys.argv[1:])
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
