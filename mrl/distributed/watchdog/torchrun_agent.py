"""torchrun, which says nothing where a rank has said what went wrong.

Owns the exit status of the launcher, the signals that it hands on, and what is worth a restart (`--max-restarts`).
torchrun ends each failure with a traceback of its own code and a table of exit codes. Where the first rank that failed
ended with one of mrl's own statuses, or the watchdog has ended the others, the message is on the terminal already: the
traceback is left out, and the status becomes the launcher's. After every other ending (a defect before the job is up,
no memory for any rank) torchrun's table stays as it is, with its status 1.

SIGUSR1, SIGTERM and SIGHUP go to the ranks, which stop in order (`graceful_stop.py`) and whose status is then the
launcher's. torchrun alone would die of SIGUSR1 and leave its ranks behind, send SIGKILL 30 s after the others, and hear
SIGHUP under `nohup`, too.

torchrun starts the ranks again after any status but 0. Here it does not after one that a restart would only repeat, or
that somebody asked for: FINAL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import main as torchrun

from mrl.distributed import launch, torchrun_rendezvous
from mrl.distributed.rendezvous import LOOPBACK, own_address
from mrl.distributed.watchdog.graceful_stop import REPEAT_S, URGENT, heard
from mrl.distributed.watchdog.signals import FAILED, REQUEUE
from mrl.errors import UserError, first_line

FINAL = (2, REQUEUE, 130, 143)
"""Statuses of `mrl` after which a restart makes no sense, see `mrl/commands/cli.py`."""

TOLD = (*FINAL, FAILED)
"""Statuses of `mrl` that come with a message."""


_had_ranks = threading.Event()
"""This launcher has started ranks."""

_over = threading.Event()
"""The last ranks of this launcher have ended."""


class Agent(LocalElasticAgent):
    """torchrun's agent of a host, which starts its ranks again only where that can help."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and told_status(result.failures) in FINAL:
            self._remaining_restarts = 0
        if result.state == WorkerState.SUCCEEDED or (
            result.state == WorkerState.FAILED and not self._remaining_restarts
        ):
            _over.set()
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        started: dict[int, object] = super()._start_workers(worker_group)
        _had_ranks.set()
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        sys.stderr.write("mrl: the ranks start again.\n")
        sys.stderr.flush()
        super()._restart_workers(worker_group)


def told_status(failures: Mapping[int, ProcessFailure]) -> int | None:
    """The status that stands for a host's failed ranks; None: not all was told.

    Args:
        failures: By rank: that of the first one to fail, and of those that ended because of it.
    """
    if any(failure.exitcode == FAILED for failure in failures.values()):
        return FAILED  # the watchdog has told of the others, too
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
    address = LOOPBACK if is_on_one_host(words) or host in ("localhost", LOOPBACK) else own_address(host)
    return ["--local-addr", address, *words]


def is_on_one_host(words: Sequence[str]) -> bool:
    """Whether these arguments of torchrun start a job that has no other host."""
    given = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--nnodes", "-nnodes")]
    given += [word.partition("=")[2] for word in words if word.startswith("--nnodes=")]
    return given[-1:] in ([], ["1"], ["1:1"])


def without_log_dir(words: Sequence[str]) -> list[str]:
    """The arguments of torchrun with no folder for the ranks' output, unless they ask for its files.

    torchrun makes one in TMPDIR for every job, and never deletes it.
    """
    mine = words[: words.index("-m")] if "-m" in words else words
    asked = ("--log-dir", "--log_dir", "-r", "--redirects", "-t", "--tee")
    if any(word.partition("=")[0] in asked for word in mine):
        return list(words)
    return ["--log-dir", os.devnull, *words]


OVER_S = 2.0
"""Ranks that are gone are missed by torchrun within this time."""

LAST_S = 5.0
"""Ranks that live so long after a second order to end are killed."""

LOOK_S = 0.1
"""Between two looks whether there are ranks yet."""


def run(words: Sequence[str]) -> int:
    """Runs torchrun and returns the exit status; `stop.SIGNALS` are blocked in every thread.

    Args:
        words: Its arguments.
    """
    threading.Thread(target=_hand_on, args=(heard(),), name="signals", daemon=True).start()
    launch.allow_sockets()
    vars(api)["LocalElasticAgent"] = Agent
    torchrun_rendezvous.install(launch.job_token(make=is_on_one_host(words)))
    launch.share_no_store()
    try:
        torchrun(without_log_dir(with_local_addr(words)))
    except UserError as error:
        sys.stderr.write(f"mrl: error: {error}\n")
        return 2
    except ChildFailedError as error:
        status = told_status(error.failures)
        if status is None:
            raise
        return status
    except (RendezvousError, DistError) as error:
        had_ranks = "" if _had_ranks.is_set() else "error: "  # ranks that lost another host have told it
        sys.stderr.write(f"mrl: {had_ranks}this host's launcher has lost the others, or did not find them: ")
        sys.stderr.write(f"{first_line(error)}\n")
        return FAILED
    except SignalException as stop:  # the ranks were sent the same signal, and have ended
        return 128 + int(stop.sigval)
    return 0


def _hand_on(signals: Collection[int]) -> None:
    first_order: float | None = None
    while True:
        number = signal.sigwait(signals)
        ranks = psutil.Process().children()
        while not ranks:
            if _over.wait(OVER_S if _had_ranks.is_set() else 0.0):
                return  # the status is known: that of the ranks
            if orders := [each for each in (number, *signal.sigpending()) if each in URGENT]:
                sys.stderr.write(f"mrl: ended by {signal.Signals(orders[0]).name} before there were ranks.\n")
                sys.stderr.flush()
                os._exit(REQUEUE)
            time.sleep(LOOK_S)
            ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if number not in URGENT:
            continue
        first_order = first_order or time.monotonic()
        if time.monotonic() - first_order > REPEAT_S:
            time.sleep(LAST_S)  # psutil's own wait would take the ranks' status away from torchrun
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
