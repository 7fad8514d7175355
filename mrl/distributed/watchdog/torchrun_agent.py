"""torchrun's agent with mrl's exit statuses, signal forwarding and restart rules.

torchrun ends every failure with a traceback of its own code and a table of exit codes. If the first failed rank exited
with one of mrl's own statuses, or the watchdog ended the others, the message is already on the terminal: the traceback
is omitted and the launcher exits with that status. Any other failure (an error before the job is up, no memory for any
rank) keeps torchrun's table and status 1.

SIGUSR1, SIGTERM and SIGHUP are forwarded to the ranks, which stop in order (`graceful_stop.py`). Plain torchrun would
die of SIGUSR1 and leave its ranks running, send SIGKILL 30 s after the others, and react to SIGHUP even under `nohup`.

torchrun restarts the ranks (`--max-restarts`) after any status but 0. Here it does not after a status in FINAL, which a
restart would only repeat or which the user asked for.
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
from mrl.distributed.watchdog.graceful_stop import REPEAT_S, URGENT, handled_signals
from mrl.distributed.watchdog.signals import FAILED, REQUEUE
from mrl.errors import UserError, first_line

FINAL = (2, REQUEUE, 130, 143)
"""Exit statuses of `mrl` after which the ranks are not restarted, see `mrl/commands/cli.py`."""

REPORTED = (*FINAL, FAILED)
"""Exit statuses of `mrl` for which a message was printed."""


_had_ranks = threading.Event()
"""Set once this launcher has started ranks."""

_ranks_ended = threading.Event()
"""Set once the last ranks of this launcher have ended."""


class Agent(LocalElasticAgent):
    """torchrun's agent of a host, which does not restart ranks after a status in FINAL."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and reported_status(result.failures) in FINAL:
            self._remaining_restarts = 0
        if result.state == WorkerState.SUCCEEDED or (
            result.state == WorkerState.FAILED and not self._remaining_restarts
        ):
            _ranks_ended.set()
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        started: dict[int, object] = super()._start_workers(worker_group)
        _had_ranks.set()
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        sys.stderr.write("mrl: restarting the ranks.\n")
        sys.stderr.flush()
        super()._restart_workers(worker_group)


def reported_status(failures: Mapping[int, ProcessFailure]) -> int | None:
    """Returns the exit status for a host's failed ranks; None if their failure was not reported with a message.

    Args:
        failures: Failures by rank: the first one, and those that it caused.
    """
    if any(failure.exitcode == FAILED for failure in failures.values()):
        return FAILED  # the watchdog has reported the failure
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode in REPORTED else None


def with_local_addr(words: Sequence[str]) -> list[str]:
    """Adds `--local-addr` with this host's address, as the other hosts see it, to torchrun's arguments.

    The c10d rendezvous sends this address to the other hosts. torchrun's default is the hostname, which often does not
    resolve.

    Raises:
        UserError: There is no route to the rendezvous endpoint.
    """
    if "--rdzv-endpoint" not in words or "--local-addr" in words:
        return list(words)
    host = words[words.index("--rdzv-endpoint") + 1].rpartition(":")[0]
    address = LOOPBACK if is_on_one_host(words) or host in ("localhost", LOOPBACK) else own_address(host)
    return ["--local-addr", address, *words]


def is_on_one_host(words: Sequence[str]) -> bool:
    """Returns whether these arguments of torchrun start a job on this host only."""
    given = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--nnodes", "-nnodes")]
    given += [word.partition("=")[2] for word in words if word.startswith("--nnodes=")]
    return given[-1:] in ([], ["1"], ["1:1"])


def without_log_dir(words: Sequence[str]) -> list[str]:
    """Sets torchrun's `--log-dir` to /dev/null unless the arguments ask for log files.

    torchrun creates a folder in TMPDIR for every job and never deletes it.
    """
    own_words = words[: words.index("-m")] if "-m" in words else words
    options = ("--log-dir", "--log_dir", "-r", "--redirects", "-t", "--tee")
    if any(word.partition("=")[0] in options for word in own_words):
        return list(words)
    return ["--log-dir", os.devnull, *words]


EXIT_NOTICE_S = 2.0
"""Time within which torchrun notices that its ranks have ended, s."""

KILL_AFTER_S = 5.0
"""Ranks that still run this long after a second SIGTERM or SIGHUP are killed, s."""

POLL_S = 0.1
"""Interval of the check for started ranks, s."""


def run(words: Sequence[str]) -> int:
    """Runs torchrun and returns the exit status; the caller has blocked `graceful_stop.SIGNALS` in every thread."""
    threading.Thread(target=_forward_signals, args=(handled_signals(),), name="signals", daemon=True).start()
    launch.raise_open_file_limit()
    vars(api)["LocalElasticAgent"] = Agent
    torchrun_rendezvous.install(launch.job_token(make=is_on_one_host(words)))
    launch.serve_own_store()
    try:
        torchrun(without_log_dir(with_local_addr(words)))
    except UserError as error:
        sys.stderr.write(f"mrl: error: {error}\n")
        return 2
    except ChildFailedError as error:
        status = reported_status(error.failures)
        if status is None:
            raise
        return status
    except (RendezvousError, DistError) as error:
        prefix = "" if _had_ranks.is_set() else "error: "  # ranks that lost another host have reported the error
        sys.stderr.write(f"mrl: {prefix}this host's torchrun cannot reach those of the other hosts: ")
        sys.stderr.write(f"{first_line(error)}\n")
        return FAILED
    except SignalException as stop:  # the ranks got the same signal and have ended
        return 128 + int(stop.sigval)
    return 0


def _forward_signals(signals: Collection[int]) -> None:
    first_urgent: float | None = None
    while True:
        number = signal.sigwait(signals)
        ranks = psutil.Process().children()
        while not ranks:
            if _ranks_ended.wait(EXIT_NOTICE_S if _had_ranks.is_set() else 0.0):
                return  # torchrun exits with the ranks' status
            if urgent := [each for each in (number, *signal.sigpending()) if each in URGENT]:
                sys.stderr.write(f"mrl: ended by {signal.Signals(urgent[0]).name} before the ranks started.\n")
                sys.stderr.flush()
                os._exit(REQUEUE)
            time.sleep(POLL_S)
            ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if number not in URGENT:
            continue
        first_urgent = first_urgent or time.monotonic()
        if time.monotonic() - first_urgent > REPEAT_S:
            time.sleep(KILL_AFTER_S)  # psutil's wait would reap the ranks, whose status torchrun needs
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
