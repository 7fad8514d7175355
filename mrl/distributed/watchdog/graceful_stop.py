"""The request to stop: by a signal, or because the time is nearly over; and that all ranks agree on it.

Owns the signals of a training process, the clock, and the last way out. What is saved and said is the caller's
(`trainer/preemption.py`, `commands/cli.py`).

    SIGUSR1     a warning: the end comes in minutes (SLURM: --signal=USR1@120). Done within `run.stop_timeout_s`
    SIGTERM     the end comes in seconds: launchers send SIGKILL 30 s later. Done within `run.term_timeout_s`
    SIGHUP      the terminal is closed, or a connection to it lost: as SIGTERM. `nohup` has it ignored
    the clock   `run.max_time_s` and the scheduler's limit, on rank 0: stops before a step that would not fit

A signal sets a request and interrupts nothing. `ask` is called by all ranks at the same points; if any rank was told,
it raises `Stopped` on all of them. A thread listens even where the main thread hangs in a collective: when the time is
over, or a second SIGTERM or SIGHUP comes, it ends the process with status REQUEUE. It imports no torch before the first
`ask`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import psutil

from mrl.config.config import RunConfig
from mrl.distributed.watchdog import signals
from mrl.distributed.watchdog.signals import REQUEUE
from mrl.errors import UserError, first_line

REPEAT_S = 2.0
"""One order reaches a rank by several ways (its launcher, its scheduler) at about the same time: it counts once."""

SPEAK_S = 3.0
"""The last message must not keep a process that ends: the run folder may be on a disk that hangs."""

LIMITS = ("run.max_time_s", "SLURM's time limit")
END_TIME = "SLURM_JOB_END_TIME"
REASONS = ("", *LIMITS, "SIGUSR1", "SIGHUP", "SIGTERM")
"""Why all ranks stop; a later one outweighs an earlier one."""

AGREED = 0x80
"""Marks a signal that another rank got."""

SIGNALS = {number: REASONS.index(number.name) for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)}
URGENT = (signal.SIGHUP, signal.SIGTERM)


def heard() -> set[signal.Signals]:
    """Of SIGNALS those that this process listens to: under `nohup` it is told to ignore SIGHUP."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return SIGNALS.keys() - ({signal.SIGHUP} if ignores else set())


class Stopped(Exception):  # noqa: N818 -- no error
    """All ranks have agreed to stop; raised on each of them at the same point."""


def limits(run: RunConfig, variables: Mapping[str, str]) -> dict[str, float]:
    """When this process must have ended: the keys of LIMITS that hold -> s of `time.monotonic`.

    What is left is worked out once: a clock that is set while the run goes on moves nothing.

    Args:
        run: Its `max_time_s` counts from the start of this process.
        variables: `SLURM_JOB_END_TIME` where SLURM or launch/slurm.sbatch set it.

    Raises:
        UserError: The variable is no number.
    """
    ends: dict[str, float] = {}
    since_epoch = time.time() - time.monotonic()
    if run.max_time_s:
        ends[LIMITS[0]] = psutil.Process().create_time() - since_epoch + run.max_time_s
    if END_TIME in variables:
        try:
            ends[LIMITS[1]] = float(variables[END_TIME]) - since_epoch
        except ValueError as error:
            raise UserError(f"{END_TIME}={variables[END_TIME]!r}: expected seconds since 1970, or unset it.") from error
    return ends


class Stop:
    """The request to stop of this process, and what the ranks have agreed on.

    Attributes:
        why: One of REASONS: what all ranks have agreed on; "" not yet.
        ends: When a limit ends this process, s of `time.monotonic`; empty on ranks that keep no time.
        reserve_s: Seconds that must be left before a limit, for a commit.
    """

    def __init__(
        self, run: RunConfig, *, ends: Mapping[str, float], keeps_time: bool, say: Callable[[str], None]
    ) -> None:
        """Not heard before `listening`.

        Args:
            run: Its `stop_timeout_s` and `term_timeout_s`.
            ends: From `limits`.
            keeps_time: Whether this rank's clock decides for all: rank 0.
            say: Prints what came of the run, as the last message.
        """
        self.why = ""
        self.reserve_s = 0.0
        self._bounds = {signal.SIGUSR1: run.stop_timeout_s} | dict.fromkeys(URGENT, run.term_timeout_s)
        self.ends = dict(ends) if keeps_time else {}
        self._say = say
        self._heard = 0
        self._first_order: float | None = None
        self._deadline: float | None = None
        self._half: float | None = None
        self._has_begun = self._has_said = False
        self._is_ending = False
        self._writer: int | None = None

    # this process

    @property
    def told(self) -> bool:
        """Whether this process was told to stop; the other ranks may not know yet. Long work on one rank asks this."""
        return bool(self._reason(self.reserve_s))

    @property
    def is_short(self) -> bool:
        """Whether half of the time is over that a signal has left this process, beside that of a commit."""
        return self._half is not None and time.monotonic() + self.reserve_s >= self._half

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGNALS are requests. Before the first `ask` there is nothing to keep: SIGTERM and SIGHUP raise.

        Raises:
            Terminated: One of these came before the first `ask`; its status is REQUEUE.
        """
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        before = {number: signal.signal(number, self._interrupt) for number in heard()}
        for number in before:
            signal.siginterrupt(number, False)
        wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)  # written to wherever the main thread is
        listener = threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True)
        listener.start()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # torchrun.py begins its ranks with a block
            yield
        except UserError:
            raise
        except Exception as error:
            if self._heard:  # often a rank that was told again ended first, and broke what this one was waiting in
                self.give_up(f"and failed ({type(error).__name__}: {first_line(error)})")
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, signals.after(handler))
            signals.found()
            signal.set_wakeup_fd(wakeup)
            os.close(self._writer)
            listener.join()
            os.close(reader)

    def say(self, what: str) -> None:
        """Rank 0 prints the last message: why the run stopped, `what` was kept, and how to go on."""
        self._say(f"stopped by {self.why}{what}")
        self._has_said = True
        signals.ignore_interrupts()

    def give_up(self, what: str) -> None:
        """Ends this process now; the last commit stands."""
        if self._has_said:
            os._exit(REQUEUE)
        name = REASONS[self._heard] or self.why
        last = threading.Thread(
            target=self._say, args=(f"told to stop by {name}, {what}; ended without a new checkpoint",), daemon=True
        )
        last.start()
        last.join(SPEAK_S)
        sys.stdout.flush()
        os._exit(REQUEUE)

    # all ranks

    def ask(self, step_s: float = 0.0) -> None:
        """Collective over the job: goes on, or raises on every rank.

        Args:
            step_s: Seconds that must be left before a limit, beside the reserve.

        Raises:
            Stopped: Some rank was told to stop, or there is too little time left.
        """
        import torch
        import torch.distributed as dist

        self._has_begun = True
        flag = torch.tensor([self._reason(self.reserve_s + step_s)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        reason = int(flag)
        if not reason:
            return
        self.why = REASONS[reason]
        for number, index in SIGNALS.items():
            if index == reason and not self._heard and self._writer is not None:
                os.write(self._writer, bytes([number | AGREED]))  # another rank was told: the same time holds here
        raise Stopped

    # inside

    def _reason(self, need_s: float) -> int:
        if self._heard:
            return self._heard
        now = time.monotonic()
        return max((REASONS.index(name) for name, end in self.ends.items() if now + need_s >= end), default=0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number in URGENT and not self._has_begun and not self._is_ending:
            self._is_ending = True
            signals.end(number, frame, REQUEUE)

    def _listen(self, reader: int) -> None:
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                self.give_up("and not done in time")
            numbers = os.read(reader, 64)
            if not numbers:
                return
            for number in numbers:
                if number & ~AGREED in SIGNALS:
                    self._hear(signal.Signals(number & ~AGREED), directly=not number & AGREED)

    def _hear(self, number: signal.Signals, *, directly: bool) -> None:
        now = time.monotonic()
        self._heard = max(self._heard, SIGNALS[number])
        if directly and number in URGENT:
            if self._first_order is not None:
                if now - self._first_order > REPEAT_S:
                    self.give_up("and then told again")
                return
            self._first_order = now
        end = now + self._bounds[number]
        self._deadline = end if self._deadline is None else min(self._deadline, end)
        self._half = min(end - self._bounds[number] / 2, self._deadline)
