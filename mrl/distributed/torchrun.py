"""`python -m mrl.distributed.torchrun ...`: torchrun as mrl wants it, see `agent.py`.

Owns the first moment: SIGUSR1 and SIGTERM are blocked before a library is imported that starts threads. The kernel
gives a signal to any thread that has it not blocked, and such a thread would let the launcher die without its ranks.
"""

from __future__ import annotations

import signal
import sys

from mrl.distributed.stop import SIGNALS


def main() -> int:
    """Runs torchrun on the command line's arguments and returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # in the ranks too: what comes before they can hear it waits
    from mrl.distributed import agent

    return agent.run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
