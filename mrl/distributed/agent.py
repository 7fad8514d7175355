"""torchrun, which says nothing where a rank has said what went wrong.

Owns the exit status of the launcher, the signals that it hands on, and what is worth a restart (`--max-restarts`).
torchrun ends each failure with a traceback of its own code and a table of exit codes. Where the first rank that failed
ended with one of mrl's own statuses, or the watchdog has ended the others, the message is on the terminal already: the
traceback is left out, and the status becomes the launcher's. After every other ending (a defect before the job is up,
no memory for any rank) torchrun's table stays as it is, with its status 1.

SIGUSR1 and SIGTERM go to the ranks, which stop in order (`stop.py`) and whose status is then the launcher's. torchrun
alone would die of SIGUSR1 and leave its ranks behind, and send SIGKILL 30 s after SIGTERM.

torchrun starts the ranks again after any status but 0. Here it does not after one that a restart would only repeat, or
that somebody asked for: FINAL.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.run import main as torchrun

from mrl.distributed.rendezvous import own_address
from mrl.distributed.stop import REPEAT_S, REQUEUE, SIGNALS
from mrl.distributed.watchdog import ENDED
from mrl.errors import UserError

FINAL = (2, REQUEUE, 130, 143)
"""Statuses of `mrl` after which a restart makes no sense, see `mrl/cli.py`."""

TOLD = (*FINAL, ENDED)
"""Statuses of `mrl` that come with a message."""


class Agent(LocalElasticAgent):
    """torchrun's agent of a host, which starts its ranks again only where that can help."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and told_status(result.failures) in FINAL:
            self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        sys.stderr.write("mrl: the ranks start again.\n")
        sys.stderr.flush()
        super()._restart_workers(worker_group)


def told_status(failures: Mapping[int, ProcessFailure]) -> int | None:
    """The status that stands for a host's failed ranks; None: not all was told.

    Args:
        failures: By rank: that of the first one to fail, and of those that ended because of it.
    """
    if any(failure.exitcode == ENDED for failure in failures.values()):
        return ENDED  # the watchdog has told of the others, too
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode in TOLD else None


def with_local_addr(words: Sequence[str]) -> list[str]:
    """The arguments of torchrun with this host's address as the others see it.

    A rendezvous that survives restarts tells it to the other hosts; torchrun would take the hostname, which often does
    not resolve.

    Raises:
        UserError: There is no way to the rendezvous.
    """
    if "--rdzv-endpoint" not in words or "--local-addr" in words:
        return list(words)
    host = words[words.index("--rdzv-endpoint") + 1].rpartition(":")[0]
    address = host if host in ("localhost", "127.0.0.1") else own_address(host)
    return ["--local-addr", address, *words]


LAST_S = 5.0
"""Ranks that live so long after a second SIGTERM are killed."""

LOOK_S = 0.1
"""Between two looks whether there are ranks yet."""


def run(words: Sequence[str]) -> int:
    """Runs torchrun and returns the exit status; SIGNALS are blocked in every thread.

    Args:
        words: Its arguments.
    """
    threading.Thread(target=_hand_on, name="signals", daemon=True).start()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the store has two connections of each rank
    vars(api)["LocalElasticAgent"] = Agent
    try:
        torchrun(with_local_addr(words))
    except UserError as error:
        sys.stderr.write(f"mrl: error: {error}\n")
        return 2
    except ChildFailedError as error:
        status = told_status(error.failures)
        if status is None:
            raise
        return status
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
