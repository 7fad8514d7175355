"""Entry point `python -m mrl.distributed.watchdog.torchrun ...`: torchrun with mrl's agent (`torchrun_agent.py`).

The signals that go to the ranks are blocked before any library that starts threads is imported. The kernel delivers a
signal to any thread that has not blocked it; such a thread would let the launcher die without its ranks. Until torchrun
forwards Ctrl-C to the ranks, it ends this process at once.
"""

from __future__ import annotations

import signal
import sys

from mrl.distributed.watchdog import gc_control, signals

FORWARDED = {signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM}
"""Signals that are forwarded to the ranks."""


def main() -> int:
    """Runs torchrun with the command line's arguments and returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # inherited by the ranks: early signals stay pending there
    signals.install_interrupt_handler()
    with gc_control.gc_disabled():
        from mrl.distributed.watchdog import torchrun_agent
    try:
        with gc_control.gc_frozen():
            return torchrun_agent.run(sys.argv[1:])
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
