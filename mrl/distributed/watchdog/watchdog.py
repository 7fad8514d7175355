"""Ends the entire job, with a single message, if a rank fails, hangs or dies.

The ranks exchange these keys through the job's store, over a connection of their own:

    beat/R    state of rank R (`hang_diagnosis.RankState`), rewritten about once a second
    alarm     a rank found a problem: all ranks add their stacks to their states
    end       message and exit status; the first one written ends every rank
    speaker   rank that prints the message: rank 0 if it answers; said: it has printed

Each rank checks itself (how long has its main thread waited in one collective?) and the next rank (does its state
change, does its process exist?). So each rank sends the store a few short requests per second, and all states are read
only after an alarm. Losing the store is a finding too: the process that served it is gone. A rank exits by `os._exit`,
which does not need the main thread; if native code keeps the GIL, faulthandler's timer exits, which does not need
Python. `hang_diagnosis.py` determines the responsible ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from mrl.distributed import job_secret
from mrl.distributed.collectives import RankFailedError, set_abort_callback
from mrl.distributed.launcher_env import LauncherEnv
from mrl.distributed.watchdog import abort, hang_diagnosis
from mrl.distributed.watchdog.hang_diagnosis import RankState
from mrl.distributed.watchdog.signals import FAILED
from mrl.distributed.watchdog.stack_dump import MainThreadMonitor, failed_in_collective, main_stack
from mrl.errors import UserError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MARGIN_S = 30.0
"""Margin of torch's own timeout of a collective over the watchdog's, so that the stacks are printed first, s."""

SAMPLING_S = 7 * 86400.0
"""torch's own timeout of collectives that wait for sampling ranks, s: no wait is too long while those make progress."""

ANSWER_S = 3.0
"""Time to answer an alarm, in addition to two heartbeat intervals, s."""

GRACE_S = 2.0
"""Time for a rank that is shutting down to leave undisturbed, s."""

SPEAK_S = 5.0
"""Time for rank 0 to print a message before its author prints it, s."""

NOBODY = -1
"""Value of `speaker` for a message that is already printed."""

PROGRESS_CHECKS = 8
"""Checks of the sampling ranks' progress per collective timeout, while a wait is already too long."""

LAUNCHER_ENDED = "the launcher has ended"
"""Reason of an alarm: the parent process of this rank is gone."""

POLL_S = 0.1
"""Polling interval of the store while waiting for a key, s."""


class Watchdog:
    """This rank's part of the watchdog; does nothing in a job of one rank."""

    def __init__(
        self,
        environment: LauncherEnv,
        *,
        collective_timeout_s: float,
        heartbeat_timeout_s: float,
        where: Callable[[], str] = lambda: "the start",
        device_is_busy: Callable[[], bool] | None = None,
        advice: Callable[[], str] = str,
        secret: Callable[[], str] = str,
    ) -> None:
        """Creates the watchdog, which is inactive before `start`.

        Args:
            environment: Launcher environment of this rank.
            collective_timeout_s: Timeout of a single collective, s; when it is exceeded the watchdog raises an alarm.
            heartbeat_timeout_s: Timeout of a rank's heartbeat, s; when it is exceeded the rank is considered lost.
            where: Returns the current step and phase, "step 12, reward".
            device_is_busy: Returns whether the GPU has pending work, see `MainThreadMonitor`.
            advice: Returns a hint for the user, appended to the error message; omitted if the call takes too long.
            secret: Returns the job's secret token, which signs the messages that end the job; available after the
                rendezvous.
        """
        self._where = where
        self._environment, self._advice, self._secret = environment, advice, secret
        self._collective_s, self._heartbeat_s = collective_timeout_s, heartbeat_timeout_s
        longest_s = max(1.0, environment.world_size / 1000)  # bounds the store's load in jobs of many ranks
        self._interval = min(longest_s, heartbeat_timeout_s / 4, collective_timeout_s / 4)
        self._main = MainThreadMonitor(device_is_busy=device_is_busy)
        self._state = RankState(environment.rank, socket.gethostname(), os.getpid(), hang_diagnosis.pid_namespace())
        self._where_since = time.monotonic()
        self._sampled: float | None = None
        self._progress_until = 0.0
        self._successor = (environment.rank + 1) % environment.world_size
        self._successor_beat = -1, time.monotonic()
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stack_published = False
        self._last_contact = time.monotonic()
        self._first_rank: RankState | None = None
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None
        self._address = ""

    # the main thread

    def start(self, store: Store) -> None:
        """Starts watching, over its own connection to the ranks' store."""
        server = getattr(store, "underlying_store", store)
        self._address = f"{getattr(server, 'host', '')}:{getattr(server, 'port', '')}"
        self._store = store.clone()  # type: ignore[attr-defined]
        self._send_heartbeat()
        self._threads = [
            threading.Thread(target=self._heartbeat_loop, name="watchdog", daemon=True),
            threading.Thread(target=self._guard_loop, name="watchdog's guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        set_abort_callback(self._fail_alone)

    def report_error(self, error: BaseException) -> None:
        """Ends the job with this rank's error and does not return.

        It returns only if the rank can leave in order: the error is on all ranks, is a stop request, or is a UserError,
        whose message the command line prints.
        """
        if self._store is None or self._closed.is_set():
            return
        if isinstance(error, UserError) and not error.on_all_ranks:
            self._post_mistake(error)
        elif isinstance(error, Exception) and not isinstance(error, UserError):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has failed
            self._fail(error)
        else:
            self.close(type(error).__name__)

    def record_forward(self) -> None:
        """Records a forward of this rank's engine; as long as forwards continue, waiting ranks do not time out."""
        self._sampled = time.monotonic()

    def close(self, left: str = hang_diagnosis.DONE) -> None:
        """Stops watching.

        Args:
            left: Reason why this rank leaves, for the other ranks.
        """
        if self._store is None or self._closed.is_set():
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, so nobody reads this
            self._send_heartbeat(left=left)
        self._closed.set()
        set_abort_callback(None)
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(GRACE_S)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reports an error, if any, and stops watching."""
        if error is not None:
            self.report_error(error)
        self.close()

    def _fail(self, error: Exception) -> None:
        """Ends the job with this rank's exception; if another rank may have caused it, raises an alarm first."""
        try:
            if isinstance(error, RankFailedError) and error.rank != self._environment.rank:
                time.sleep(SPEAK_S)  # that rank's own message ends this process
            elif failed_in_collective(error):
                self._state = replace(self._state, broken=first_line(error))
                self._alarm(error)
            self._end(self._describe(error))
        except RuntimeError as lost:
            self._end_without_store(first_line(lost))
        abort.hard_exit(FAILED)

    def _post_mistake(self, error: UserError) -> None:
        """Posts a UserError of this rank only, for the other ranks.

        If this is its host's first rank the command line prints the message, otherwise rank 0 does.
        """
        text = self._describe(error)
        self.close(type(error).__name__)
        with contextlib.suppress(RuntimeError):  # if the store is lost, the other ranks notice that
            if self._post_end(text, status=2, speaker=0):
                if self._environment.local_rank == 0:
                    self._post("speaker", "command line")
                    self._post("said", "1")
                self._post("alarm", str(self._environment.rank))
                time.sleep(2 * self._interval)  # this rank may serve the store from which the others read the message

    def _describe(self, error: Exception) -> str:
        if isinstance(error, UserError):
            return f"{error}\nRaised on {self._state}, at {self._where()}."
        return f"{self._state} failed at {self._where()}:\n{_traceback(error)}"

    def _fail_alone(self, error: Exception) -> None:
        """Ends the job from a thread, since the others wait in a collective that this rank's main thread has left."""
        if self._closed.is_set():
            return
        try:
            self._end(self._describe(error), status=2 if isinstance(error, UserError) else FAILED)
        except RuntimeError as lost:
            self._end_without_store(first_line(lost))

    # the heartbeat thread

    def _heartbeat_loop(self) -> None:
        try:
            self._add("came")
            while not self._closed.wait(self._interval):
                self._send_heartbeat()
                if self._exists("alarm"):
                    self._follow_alarm()
                    return
                if reason := self._find_problem():
                    self._alarm(reason)
        except job_secret.AuthenticationError as intrusion:
            self._end_after_intrusion(first_line(intrusion))
        except RuntimeError as lost:  # torch's DistError
            self._end_without_store(first_line(lost))

    def _find_problem(self) -> str:
        """Returns the problem with this rank or its successor; "": none."""
        if self._environment.launcher != "none" and os.getppid() != self._parent:
            return LAUNCHER_ENDED
        if (self._state.waits_s or 0.0) > self._collective_s and not self._waits_for_sampling():
            return "a collective takes too long"
        if not self._all_started():
            return ""
        state = self._read(self._successor)
        if self._environment.local_rank == 0 or self._first_rank is None:
            self._first_rank = self._read(0)
        if state.left == hang_diagnosis.DONE:
            return ""
        beat, since = self._successor_beat
        if state.beat != beat:
            self._successor_beat = state.beat, time.monotonic()
        elif time.monotonic() - since > self._heartbeat_s:
            return "silent"
        return self._process_state(state)

    def _waits_for_sampling(self) -> bool:
        """Returns whether the awaited ranks are sampling and make progress."""
        now = time.monotonic()
        if now >= self._progress_until and hang_diagnosis.are_sampling(self._read_all(), self._collective_s):
            self._progress_until = now + self._collective_s / PROGRESS_CHECKS
        return now < self._progress_until

    def _send_heartbeat(self, *, left: str = "", stack: str = "") -> None:
        with self._lock:
            now, state, where = time.monotonic(), self._state, self._where()
            if where != state.where:
                self._where_since = now
            self._state = replace(
                state, beat=state.beat + 1, where=where, where_s=now - self._where_since, waits_s=self._main.poll(),
                sampled_s=None if self._sampled is None else now - self._sampled,
                left=left or state.left, stack=stack or state.stack,
            )  # fmt: skip
            self._connection.set(f"watchdog/beat/{state.rank}", self._state.encode())
            self._last_contact = time.monotonic()

    def _alarm(self, reason: str | Exception) -> None:
        """Collects all ranks' states, composes the message and ends the job; if an alarm exists, follows that one."""
        if not self._post("alarm", str(self._environment.rank)):
            self._follow_alarm()
            return
        self._publish_stack()
        states, gone = self._collect()
        error = reason if isinstance(reason, Exception) else None
        if error is not None and not hang_diagnosis.caused_by_other_ranks(states, gone, self._environment.world_size):
            text = f"{self._state} failed at {self._where()}, in a collective:\n{_traceback(error)}"
        elif reason == LAUNCHER_ENDED:
            text = f"the launcher of {self._state}, process {self._parent} on that host, has ended."
        else:
            text = hang_diagnosis.diagnose(states, gone, self._environment.world_size)
        self._end(text, speaker=self._environment.rank if 0 in gone else 0)

    def _publish_stack(self) -> None:
        if not self._stack_published:
            self._stack_published = True
            self._send_heartbeat(stack=main_stack())

    def _collect(self) -> tuple[dict[int, RankState], dict[int, str]]:
        """Returns all ranks' states with stacks, and a finding for each rank that does not answer in time."""
        limit_s = ANSWER_S + 2 * self._interval
        deadline = time.monotonic() + limit_s
        while True:
            states = self._read_all()
            silent = [state for state in states.values() if not state.stack and not state.left]
            gone = {state.rank: ending for state in silent if (ending := self._process_state(state))}
            if len(gone) == len(silent) or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        beat, since = self._successor_beat
        for state in silent:
            if state.rank not in gone:
                quiet_s = limit_s if state.rank != self._successor or state.beat != beat else time.monotonic() - since
                is_running = state.space == self._state.space
                why = "; its process exists, but is stopped, or native code keeps the GIL" if is_running else ""
                gone[state.rank] = f"has not answered for {quiet_s:.0f} s{why}"
        return states, gone

    def _process_state(self, state: RankState) -> str:
        """Returns GONE if the rank's process has ended; "" if it runs or cannot be seen from here."""
        if state.space != self._state.space or state.left:
            return ""
        try:
            ended = psutil.Process(state.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        except psutil.Error:
            return ""
        return hang_diagnosis.GONE if ended else ""

    # the end

    def _end(self, text: str, *, speaker: int = 0, status: int = FAILED) -> None:
        """Posts a message unless one exists, and ends this rank with the one that was posted first."""
        self._post_end(text, status=status, speaker=speaker)
        self._post("alarm", str(self._environment.rank))
        self._follow_alarm(is_author=True)

    def _follow_alarm(self, *, is_author: bool = False) -> None:
        """Publishes the stack, waits for the message, prints it if responsible, and exits; returns only if closed."""
        self._publish_stack()
        deadline = time.monotonic() + 2 * (ANSWER_S + SPEAK_S) + 4 * self._interval
        while not self._exists("end"):
            if self._closed.wait(POLL_S):
                return
            if time.monotonic() > deadline:  # the rank that raised the alarm is gone too
                states, gone = self._collect()
                speaker = self._environment.rank if 0 in gone else 0
                self._end(hang_diagnosis.diagnose(states, gone, self._environment.world_size), speaker=speaker)
        end = self._read_end()
        if end["status"] != FAILED and self._closed.wait(GRACE_S):
            return  # the main thread has the same UserError and shuts down in order
        if end["speaker"] == NOBODY:
            abort.hard_exit(end["status"])
        if self._environment.rank == end["speaker"]:
            self._print_message(end["text"])
            time.sleep(GRACE_S)  # this process may serve the store, which the others still read
        else:
            deadline = time.monotonic() + SPEAK_S + GRACE_S * (not is_author)
            while not self._exists("said") and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if not self._exists("said"):
                self._print_message(end["text"])
        abort.hard_exit(end["status"])

    def _print_message(self, text: str) -> None:
        if self._post("speaker", str(self._environment.rank)):
            abort.print_error(text, self._advice)
            self._post("said", "1")

    def _end_without_store(self, why: str) -> None:
        """Ends this rank because the store does not answer: its host or the process that served it is gone."""
        if self._closed.wait(GRACE_S):
            return  # the job is done and rank 0 left first
        text = f"{self._state}, at {self._where()}, lost its connection to the job's store at {self._address}: {why}."
        if self._first_rank is not None:
            host_ranks = hang_diagnosis.format_ranks(range(self._environment.local_world_size))
            finding = self._process_state(self._first_rank) or f"is gone, or its host with {host_ranks}"
            text = f"{self._first_rank} {finding}. {hang_diagnosis.describe_last_phase(self._first_rank)}\n{text}"
        if abort.claim_message(self._address):
            abort.print_error(text, self._advice)
        else:
            time.sleep(GRACE_S)
        abort.hard_exit(FAILED)

    def _end_after_intrusion(self, why: str) -> None:
        """Ends the job because a process outside of it wrote to the store; one rank per host prints the message."""
        text = (
            f"{why}. {self._state}, at {self._where()}, read it from the job's store at {self._address}: a process "
            "outside this job can reach that port. Check the firewall, and start again."
        )
        if abort.claim_message(self._address):
            abort.print_error(text, self._advice)
            with contextlib.suppress(RuntimeError):
                self._connection.set(
                    "watchdog/end", hang_diagnosis.encode_end_record(self._secret(), text, FAILED, NOBODY)
                )
                self._connection.set("watchdog/alarm", str(self._environment.rank))
        time.sleep(GRACE_S + 2 * self._interval)  # this process may serve the store, which the others still read
        abort.hard_exit(FAILED)

    # the thread that watches the heartbeat thread

    def _guard_loop(self) -> None:
        """Ends this rank if the store does not answer at all, or if Python no longer runs."""
        late = 0
        while not self._closed.wait(min(1.0, self._interval)):
            faulthandler.dump_traceback_later(2 * self._heartbeat_s + SPEAK_S, exit=True)
            quiet_s = time.monotonic() - self._last_contact
            late = late + 1 if quiet_s > self._heartbeat_s + ANSWER_S + SPEAK_S else 0
            if late > 1:
                self._end_without_store(f"no answer for {quiet_s:.0f} s")

    # the store

    @property
    def _connection(self) -> Store:
        if self._store is None:
            raise RuntimeError("the watchdog was not started")
        return self._store

    def _post(self, name: str, text: str) -> bool:
        """Writes a key unless it exists; returns whether it was written."""
        with self._lock:
            is_new = not self._connection.check([f"watchdog/{name}"])
            return is_new and self._connection.compare_set(f"watchdog/{name}", "", text).decode() == text

    def _post_end(self, text: str, *, status: int, speaker: int) -> bool:
        return self._post("end", hang_diagnosis.encode_end_record(self._secret(), text, status, speaker))

    def _read_end(self) -> dict[str, Any]:
        with self._lock:
            return hang_diagnosis.decode_end_record(self._secret(), self._connection.get("watchdog/end"))

    def _exists(self, name: str) -> bool:
        with self._lock:
            found = bool(self._connection.check([f"watchdog/{name}"]))
            self._last_contact = time.monotonic()
            return found

    def _add(self, name: str, amount: int = 1) -> int:
        with self._lock:
            return int(self._connection.add(f"watchdog/{name}", amount))

    def _all_started(self) -> bool:
        return self._first_rank is not None or self._add("came", 0) >= self._environment.world_size

    def _read(self, rank: int) -> RankState:
        with self._lock:
            return hang_diagnosis.decode(self._connection.get(f"watchdog/beat/{rank}"))

    def _read_all(self) -> dict[int, RankState]:
        keys = [f"watchdog/beat/{rank}" for rank in range(self._environment.world_size)]
        if not self._all_started():
            keys = [key for key in keys if self._exists(key.removeprefix("watchdog/"))]
        with self._lock:
            found = [hang_diagnosis.decode(data) for data in self._connection.multi_get(keys)]
        return {state.rank: state for state in found}


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
