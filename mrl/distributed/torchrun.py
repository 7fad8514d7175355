"""`python -m mrl.distributed.torchrun ...`: torchrun, which says nothing where a rank has said what went wrong.

Owns the exit status of the launcher. torchrun ends each failure with a traceback of its own code and a table of exit
codes. Where the first rank that failed ended with one of mrl's own statuses, its message is on the terminal already:
the traceback is left out, and the status becomes the launcher's. After every other ending (a defect, a signal, no
memory) torchrun's table stays as it is, with its status 1.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

TOLD = (2, 130, 143)
"""Statuses of `mrl` that come with a message, see `mrl/cli.py`."""


def main() -> int:
    """Runs torchrun on the command line's arguments and returns the exit status."""
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


if __name__ == "__main__":
    sys.exit(main())
