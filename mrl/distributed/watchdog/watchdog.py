"""Ends the whole job, with one message, where a rank fails, hangs or is gone.

Owns what the ranks tell each other beside their collectives, in a store of their own connection:

    beat/R    what rank R does now (`blame.RankState`), again every second or so
    alarm     some rank found a reason to ask everyone: all ranks add their stacks to their beats
    end       the message and the exit status: the first one stands, and ends every rank
    speaker   who prints it, rank 0 where it still answers; said: it has

Each rank looks after itself (how long has its main thread waited in one collective?) and after the rank that follows it
(does it still beat? is its process still there?). So the store has a few short requests a second from each rank, and
nobody reads the states of all before there is an alarm. Losing the store is a finding, too: the process that served it
is gone. A rank leaves by `os._exit`, which needs no main thread; where native code keeps Python's lock, by
faulthandler's timer, which needs no Python. Who is to blame is told by `hang_diagnosis.py`.
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
from mrl.distributed.collectives import RankFailedError, when_alone
from mrl.distributed.launcher_env import Environment
from mrl.distributed.watchdog import abort, hang_diagnosis
from mrl.distributed.watchdog.hang_diagnosis import RankState
from mrl.distributed.watchdog.signals import FAILED
from mrl.distributed.watchdog.stack_dump import MainThread, failed_in_collective, main_stack
from mrl.errors import UserError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MARGIN_S = 30.0
"""By so much later than this one torch's own timeout of a collective comes: then the stacks are told already."""

SAMPLING_S = 7 * 86400.0
"""torch's own timeout where ranks wait for others that sample: as long as those make forwards, no wait is too long."""

ANSWER_S = 3.0
"""After an alarm a rank has this long, and two beats, to say what it does."""

GRACE_S = 2.0
"""A rank that is about to leave in order is not disturbed for so long."""

SPEAK_S = 5.0
"""Rank 0 has this long to print a message; then the one that wrote it does."""

NOBODY = -1
"""As the one who prints a message: it is printed already."""

OFTEN = 8
"""Looks at what the others do within the time after which a wait is too long, once it is."""

POLL_S = 0.1
"""Between two looks for what was asked for."""


class Watchdog:
    """This rank's part of the watch; does nothing in a job of one rank.

    Attributes:
        where: What this rank does now, "step 12, reward"; to be set once that is known.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        collective_timeout_s: float,
        heartbeat_timeout_s: float,
        device_is_busy: Callable[[], bool] | None = None,
        advice: Callable[[], str] = str,
        secret: Callable[[], str] = str,
    ) -> None:
        """Not on watch before `start`.

        Args:
            environment: Of this rank.
            collective_timeout_s: A wait in one collective that takes longer is an alarm, s.
            heartbeat_timeout_s: A rank that gives no sign of life for so long is gone, s.
            device_is_busy: See `MainThread`.
            advice: What to do after the message; read when it is printed, and left out where that takes too long.
            secret: The job's token, known once the ranks have met: only who knows it can end the job.
        """
        self.where: Callable[[], str] = lambda: "the start"
        self._environment, self._advice, self._secret = environment, advice, secret
        self._collective_s, self._heartbeat_s = collective_timeout_s, heartbeat_timeout_s
        few = max(1.0, environment.world_size / 1000)  # so that the store's load does not grow with the ranks
        self._interval = min(few, heartbeat_timeout_s / 4, collective_timeout_s / 4)
        self._main = MainThread(device_is_busy=device_is_busy)
        self._state = RankState(environment.rank, socket.gethostname(), os.getpid(), hang_diagnosis.process_space())
        self._where_since = time.monotonic()
        self._sampled: float | None = None
        self._excused_until = 0.0
        self._next = (environment.rank + 1) % environment.world_size
        self._next_beat = -1, time.monotonic()
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._answered = False
        self._exchanged = time.monotonic()
        self._first: RankState | None = None
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None
        self._address = ""

    # the main thread

    def start(self, store: Store) -> None:
        """Goes on watch, over a connection of its own to the store of the ranks."""
        server = getattr(store, "underlying_store", store)
        self._address = f"{getattr(server, 'host', '')}:{getattr(server, 'port', '')}"
        self._store = store.clone()  # type: ignore[attr-defined]
        self._beat()
        self._threads = [
            threading.Thread(target=self._talk, name="watchdog", daemon=True),
            threading.Thread(target=self._guard, name="watchdog's guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        when_alone(self._fail_alone)

    def tell(self, error: BaseException) -> None:
        """This rank cannot go on: ends the job with its message, and does not return.

        It returns where the rank leaves in order: the error is everywhere, or a request to stop, or the user's mistake,
        whose message the command line prints.
        """
        if self._store is None or self._closed.is_set():
            return
        if isinstance(error, UserError) and not error.everywhere:
            self._hand_over(error)
        elif isinstance(error, Exception) and not isinstance(error, UserError):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, for another rank that failed
            self._fail(error)
        else:
            self.close(type(error).__name__)

    def sampled(self) -> None:
        """This rank's engine has made a forward: who waits for it waits for work, as long as more of them come."""
        self._sampled = time.monotonic()

    def close(self, left: str = hang_diagnosis.DONE) -> None:
        """Goes off watch; `left` says to the others why."""
        if self._store is None or self._closed.is_set():
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is the reason to tell anyone
            self._beat(left=left)
        self._closed.set()
        when_alone(None)
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(GRACE_S)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tells of an error, and goes off watch."""
        if error is not None:
            self.tell(error)
        self.close()

    def _fail(self, error: Exception) -> None:
        """Posts this rank's exception; where another rank seems to be the reason, asks around first."""
        try:
            if isinstance(error, RankFailedError) and error.rank != self._environment.rank:
                time.sleep(SPEAK_S)  # its own message comes, and ends this process
            elif failed_in_collective(error):
                self._state = replace(self._state, broken=first_line(error))
                self._alarm(error)
            self._end(f"{self._state} failed at {self.where()}:\n{_traceback(error)}")
        except RuntimeError as lost:
            self._lose_store(first_line(lost))
        abort.leave(FAILED)

    def _hand_over(self, error: UserError) -> None:
        """The others are told of a mistake that only this rank has seen.

        On each host's first rank the command line prints it; else rank 0 does, here.
        """
        text = self._mistake(error)
        self.close(type(error).__name__)
        with contextlib.suppress(RuntimeError):  # the others learn it from the lost store
            if self._post_end(text, status=2, speaker=0):
                if self._environment.local_rank == 0:
                    self._post("speaker", "command line")
                    self._post("said", "1")
                self._post("alarm", str(self._environment.rank))
                time.sleep(2 * self._interval)  # rank 0 may serve the store that the others read this from

    def _mistake(self, error: UserError) -> str:
        return f"{error}\nThis was on {self._state}, at {self.where()}."

    def _fail_alone(self, error: Exception) -> None:
        """In a thread: the others wait for the main thread in a collective that it has left with an error."""
        if self._closed.is_set():
            return
        try:
            if isinstance(error, UserError):
                self._end(self._mistake(error), status=2)
            else:
                self._end(f"{self._state} failed at {self.where()}:\n{_traceback(error)}")
        except RuntimeError as lost:
            self._lose_store(first_line(lost))

    # the thread that talks

    def _talk(self) -> None:
        try:
            self._add("came")
            while not self._closed.wait(self._interval):
                self._beat()
                if self._is_there("alarm"):
                    self._obey()
                    return
                if reason := self._look():
                    self._alarm(reason)
        except job_secret.StrangerError as stranger:
            self._leave_to_stranger(first_line(stranger))
        except RuntimeError as lost:  # torch's DistError
            self._lose_store(first_line(lost))

    def _look(self) -> str:
        """What is wrong with this rank or with the next one; "" nothing."""
        if self._environment.launcher != "none" and os.getppid() != self._parent:
            return "the launcher is gone"
        if (self._state.waits_s or 0.0) > self._collective_s and not self._is_excused():
            return "a collective takes too long"
        if not self._all_came():
            return ""
        state = self._read(self._next)
        if self._environment.local_rank == 0 or self._first is None:
            self._first = self._read(0)
        if state.left == hang_diagnosis.DONE:
            return ""
        beat, since = self._next_beat
        if state.beat != beat:
            self._next_beat = state.beat, time.monotonic()
        elif time.monotonic() - since > self._heartbeat_s:
            return "silent"
        return self._ending_of(state)

    def _is_excused(self) -> bool:
        """Whether who is waited for samples, and does not stand still."""
        now = time.monotonic()
        if now >= self._excused_until and hang_diagnosis.are_sampling(self._read_all(), self._collective_s):
            self._excused_until = now + self._collective_s / OFTEN
        return now < self._excused_until

    def _beat(self, *, left: str = "", stack: str = "") -> None:
        with self._lock:
            now, state, where = time.monotonic(), self._state, self.where()
            if where != state.where:
                self._where_since = now
            self._state = replace(
                state, beat=state.beat + 1, where=where, where_s=now - self._where_since, waits_s=self._main.look(),
                sampled_s=None if self._sampled is None else now - self._sampled,
                left=left or state.left, stack=stack or state.stack,
            )  # fmt: skip
            self._connection.set(f"watchdog/beat/{state.rank}", self._state.encode())
            self._exchanged = time.monotonic()

    def _alarm(self, reason: str | Exception) -> None:
        """Asks everyone, writes the message, and ends the job; a second one to do so waits for the first one's end."""
        if not self._post("alarm", str(self._environment.rank)):
            self._obey()
            return
        self._answer()
        states, gone = self._collect()
        error = reason if isinstance(reason, Exception) else None
        if error is not None and not hang_diagnosis.is_somebody_to_blame(states, gone, self._environment.world_size):
            text = f"{self._state} failed at {self.where()}, in a collective:\n{_traceback(error)}"
        elif reason == "the launcher is gone":
            text = f"the launcher of {self._state} is gone: process {self._parent} on that host."
        else:
            text = hang_diagnosis.judge(states, gone, self._environment.world_size)
        self._end(text, speaker=self._environment.rank if 0 in gone else 0)

    def _answer(self) -> None:
        if not self._answered:
            self._answered = True
            self._beat(stack=main_stack())

    def _collect(self) -> tuple[dict[int, RankState], dict[int, str]]:
        """The states of all ranks with their stacks; of those that do not answer in time, what is known instead."""
        limit_s = ANSWER_S + 2 * self._interval
        deadline = time.monotonic() + limit_s
        while True:
            states = self._read_all()
            silent = [state for state in states.values() if not state.stack and not state.left]
            gone = {state.rank: ending for state in silent if (ending := self._ending_of(state))}
            if len(gone) == len(silent) or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        beat, since = self._next_beat
        for state in silent:
            if state.rank not in gone:
                quiet_s = limit_s if state.rank != self._next or state.beat != beat else time.monotonic() - since
                is_there = state.space == self._state.space
                why = "; its process is there: it is stopped, or native code keeps Python's lock" if is_there else ""
                gone[state.rank] = f"gives no sign of life for {quiet_s:.0f} s{why}"
        return states, gone

    def _ending_of(self, state: RankState) -> str:
        """GONE where this process can see that another one has ended; "" it runs, or nobody here can tell."""
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
        """Posts a message unless one is there, and ends this rank by what stands."""
        self._post_end(text, status=status, speaker=speaker)
        self._post("alarm", str(self._environment.rank))
        self._obey(mine=True)

    def _obey(self, *, mine: bool = False) -> None:
        """Answers an alarm, waits for the message, prints it if this rank is to, and leaves; returns only if closed."""
        self._answer()
        deadline = time.monotonic() + 2 * (ANSWER_S + SPEAK_S) + 4 * self._interval
        while not self._is_there("end"):
            if self._closed.wait(POLL_S):
                return
            if time.monotonic() > deadline:  # the one that asked is gone as well
                states, gone = self._collect()
                speaker = self._environment.rank if 0 in gone else 0
                self._end(hang_diagnosis.judge(states, gone, self._environment.world_size), speaker=speaker)
        end = self._read_end()
        if end["status"] != FAILED and self._closed.wait(GRACE_S):
            return  # the main thread has seen the same mistake, and leaves in order
        if end["speaker"] == NOBODY:
            abort.leave(end["status"])
        if self._environment.rank == end["speaker"]:
            self._speak(end["text"])
            time.sleep(GRACE_S)  # the store may be this process's: the others read on
        else:
            deadline = time.monotonic() + SPEAK_S + GRACE_S * (not mine)
            while not self._is_there("said") and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if not self._is_there("said"):
                self._speak(end["text"])
        abort.leave(end["status"])

    def _speak(self, text: str) -> None:
        if self._post("speaker", str(self._environment.rank)):
            abort.say(text, self._advice)
            self._post("said", "1")

    def _lose_store(self, why: str) -> None:
        """The store does not answer: its host is gone, or the process there that served it."""
        if self._closed.wait(GRACE_S):
            return  # the job is done, and rank 0 was the first to leave
        text = f"{self._state}, at {self.where()}, has lost the store of the job at {self._address}: {why}."
        if self._first is not None:
            here = hang_diagnosis.ranks(range(self._environment.local_world_size))
            what = self._ending_of(self._first) or f"is gone, or its whole host with {here}"
            last = (
                f"It was last heard at {self._first.where}, for {self._first.where_s:.0f} s, and has no stack to show."
            )
            text = f"{self._first} {what}. {last}\n{text}"
        if abort.is_mine_to_say(self._address):
            abort.say(text, self._advice)
        else:
            time.sleep(GRACE_S)
        abort.leave(FAILED)

    def _leave_to_stranger(self, why: str) -> None:
        """The store holds what no rank wrote: one rank of each host says so, the others follow it without a word."""
        text = (
            f"{why}. {self._state}, at {self.where()}, found it in the store of the job at {self._address}: a foreign "
            "process reaches that port."
        )
        if abort.is_mine_to_say(self._address):
            abort.say(text, self._advice)
            with contextlib.suppress(RuntimeError):
                self._connection.set("watchdog/end", hang_diagnosis.seal_end(self._secret(), text, FAILED, NOBODY))
                self._connection.set("watchdog/alarm", str(self._environment.rank))
        time.sleep(GRACE_S + 2 * self._interval)  # the store may be this process's: the others read on
        abort.leave(FAILED)

    # the thread that looks after the first one

    def _guard(self) -> None:
        """Ends this rank where the store gives no answer at all, or where no Python runs any more."""
        late = 0
        while not self._closed.wait(min(1.0, self._interval)):
            faulthandler.dump_traceback_later(2 * self._heartbeat_s + SPEAK_S, exit=True)
            quiet_s = time.monotonic() - self._exchanged
            late = late + 1 if quiet_s > self._heartbeat_s + ANSWER_S + SPEAK_S else 0
            if late > 1:
                self._lose_store(f"no answer for {quiet_s:.0f} s")

    # the store

    @property
    def _connection(self) -> Store:
        if self._store is None:
            raise RuntimeError("the watchdog was not started")
        return self._store

    def _post(self, name: str, text: str) -> bool:
        """Whether this was the first value of that name."""
        with self._lock:
            is_new = not self._connection.check([f"watchdog/{name}"])
            return is_new and self._connection.compare_set(f"watchdog/{name}", "", text).decode() == text

    def _post_end(self, text: str, *, status: int, speaker: int) -> bool:
        return self._post("end", hang_diagnosis.seal_end(self._secret(), text, status, speaker))

    def _read_end(self) -> dict[str, Any]:
        with self._lock:
            return hang_diagnosis.open_end(self._secret(), self._connection.get("watchdog/end"))

    def _is_there(self, name: str) -> bool:
        with self._lock:
            found = bool(self._connection.check([f"watchdog/{name}"]))
            self._exchanged = time.monotonic()
            return found

    def _add(self, name: str, amount: int = 1) -> int:
        with self._lock:
            return int(self._connection.add(f"watchdog/{name}", amount))

    def _all_came(self) -> bool:
        return self._first is not None or self._add("came", 0) >= self._environment.world_size

    def _read(self, rank: int) -> RankState:
        with self._lock:
            return hang_diagnosis.decode(self._connection.get(f"watchdog/beat/{rank}"))

    def _read_all(self) -> dict[int, RankState]:
        keys = [f"watchdog/beat/{rank}" for rank in range(self._environment.world_size)]
        if not self._all_came():
            keys = [key for key in keys if self._is_there(key.removeprefix("watchdog/"))]
        with self._lock:
            found = [hang_diagnosis.decode(data) for data in self._connection.multi_get(keys)]
        return {state.rank: state for state in found}


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
