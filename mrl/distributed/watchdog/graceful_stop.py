"""Stop requests of a training run, by signal or time limit, on which all ranks agree.

    SIGUSR1     advance warning, minutes before the end (SLURM: --signal=USR1@120). Stops within `run.stop_timeout_s`,
                or longer if the last steps and checkpoints took longer, but before SLURM's time limit
    SIGTERM     the end is near: launchers send SIGKILL 30 s later. Stops within `run.term_timeout_s`
    SIGHUP      the terminal or its connection is closed: like SIGTERM. `nohup` ignores it
    time        `run.max_time_s` and the scheduler's limit, on rank 0: stops before a step that would not fit

A signal only sets a request. All ranks call `ask` at the same points; if any of them has a request, it raises
`StopRequested` on all. A thread receives signals even if the main thread hangs in a collective. When the time is over,
or at a second SIGTERM or SIGHUP, it ends the process with status REQUEUE. What is saved and printed is decided in
`trainer/preemption.py` and `commands/cli.py`. No torch is imported before the first `ask`.
"""

from __future__ import annotations

import math
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
"""Signals within this time count as one, s: launcher and scheduler may both send the same request to a rank."""

MESSAGE_S = 3.0
"""Time limit of the last message, s: the run folder may be on a disk that hangs."""

EXIT_S = 15.0
"""Time before SLURM's time limit for the last message, the end of the launchers and the requeue, s."""

LIMITS = ("run.max_time_s", "SLURM's time limit")
END_TIME = "SLURM_JOB_END_TIME"
REASONS = ("", *LIMITS, "SIGUSR1", "SIGHUP", "SIGTERM")
"""Reasons to stop, by increasing priority."""

AGREED = 0x80
"""Flag of a signal that another rank received."""

SIGNALS = {number: REASONS.index(number.name) for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)}
URGENT = (signal.SIGHUP, signal.SIGTERM)
TIMEOUTS = {signal.SIGUSR1: "run.stop_timeout_s"} | dict.fromkeys(URGENT, "run.term_timeout_s")
"""Config key of the time from each signal to the end of the process."""


def handled_signals() -> set[signal.Signals]:
    """Returns the signals that request a stop in this process: SIGNALS, without SIGHUP if it is ignored (`nohup`)."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return SIGNALS.keys() - ({signal.SIGHUP} if ignores else set())


class StopRequested(Exception):  # noqa: N818 -- not an error
    """Raised on all ranks at the same point once they have agreed to stop."""


def limits(run: RunConfig, variables: Mapping[str, str]) -> dict[str, float]:
    """Returns the time limits that are set: key of LIMITS -> deadline on `time.monotonic`, s.

    Deadlines are computed once: later changes of the system clock do not move them.

    Args:
        run: Config; `max_time_s` counts from the start of this process.
        variables: Environment variables; SLURM or launch/slurm.sbatch sets `SLURM_JOB_END_TIME`.

    Raises:
        UserError: SLURM_JOB_END_TIME is not a number.
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
    """Stop request of this process, and the reason on which all ranks agreed.

    Attributes:
        why: Reason on which all ranks agreed, one of REASONS; "": none yet.
        ends: Deadline of each time limit on `time.monotonic`, s; empty on ranks that do not keep time.
        reserve_s: Time to reserve before a limit for writing a checkpoint, s.
        step_s: Time that the current step may take, s; 0: unknown.
    """

    def __init__(
        self, run: RunConfig, *, ends: Mapping[str, float], keeps_time: bool, say: Callable[[str], None]
    ) -> None:
        """Creates the state; signals are handled inside `handle_signals`.

        Args:
            run: Config with `stop_timeout_s` and `term_timeout_s`.
            ends: Deadlines, from `limits`.
            keeps_time: True on the rank whose clock decides for all, rank 0.
            say: Prints the outcome of the run as its last message.
        """
        self.why = ""
        self.reserve_s = self.step_s = 0.0
        of_key = {"run.stop_timeout_s": run.stop_timeout_s, "run.term_timeout_s": run.term_timeout_s}
        self._timeouts = {number: of_key[key] for number, key in TIMEOUTS.items()}
        self.ends = dict(ends) if keeps_time else {}
        self._job_end = ends.get(LIMITS[1], math.inf)
        self._say = say
        self._received = 0
        self._first_urgent: float | None = None
        self._deadline: float | None = None
        self._timeout_key = self._allowed = ""
        self._halfway: float | None = None
        self._asked = self._has_printed = False
        self._is_ending = False
        self._writer: int | None = None

    # this process

    @property
    def is_requested(self) -> bool:
        """True if a signal or time limit requests a stop of this process, even before the ranks agreed.

        Long work on a single rank polls this.
        """
        return bool(self._reason(self.reserve_s))

    @property
    def is_time_short(self) -> bool:
        """True if half of the time left after a signal, without the reserve for a checkpoint, is over."""
        return self._halfway is not None and time.monotonic() + self.reserve_s >= self._halfway

    @property
    def time_left_s(self) -> float | None:
        """Seconds to the earliest deadline, of a signal or a time limit; None without one."""
        ends = [*self.ends.values(), *([] if self._deadline is None else [self._deadline])]
        return min(ends) - time.monotonic() if ends else None

    def timeouts_below(self, seconds: float) -> dict[str, float]:
        """Returns the timeouts that are shorter than this: config key -> timeout, s."""
        return {TIMEOUTS[number]: timeout for number, timeout in self._timeouts.items() if timeout < seconds}

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Turns SIGNALS into stop requests inside the block.

        Before the first `ask` there is nothing to save: SIGTERM and SIGHUP raise.

        Raises:
            Terminated: SIGTERM or SIGHUP came before the first `ask`; its status is REQUEUE.
        """
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        before = {number: signal.signal(number, self._interrupt) for number in handled_signals()}
        for number in before:
            signal.siginterrupt(number, False)
        wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)  # works while the main thread hangs
        listener = threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True)
        listener.start()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # torchrun.py starts its ranks with these blocked
            yield
        except UserError:
            raise
        except Exception as error:
            if self._received:  # often another rank gave up first, which broke a collective of this one
                self.abort(f"then failed ({type(error).__name__}: {first_line(error)})")
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, signals.handler_to_restore(handler))
            signals.cancel_forced_exit()
            signal.set_wakeup_fd(wakeup)
            os.close(self._writer)
            listener.join()
            os.close(reader)

    def print_reason(self, what: str) -> None:
        """Prints the last message of the run on rank 0: the reason of the stop, followed by `what`."""
        self._say(f"stopped by {self.why}{what}")
        self._has_printed = True
        signals.ignore_interrupts()

    def abort(self, what: str, advice: str = "") -> None:
        """Ends this process at once; the last checkpoint remains valid."""
        if self._has_printed:
            os._exit(REQUEUE)
        name = REASONS[self._received] or self.why
        text = f"stop requested by {name}, {what}; ended without a new checkpoint{advice}"
        last = threading.Thread(target=self._say, args=(text,), daemon=True)
        last.start()
        last.join(MESSAGE_S)
        sys.stdout.flush()
        os._exit(REQUEUE)

    # all ranks

    def ask(self, step_s: float = 0.0) -> None:
        """Collective over all ranks: returns, or raises on every rank if any has a stop request.

        Args:
            step_s: Time needed before a limit in addition to the reserve, s.

        Raises:
            Stopped: Some rank received a signal, or too little time is left.
        """
        import torch
        import torch.distributed as dist

        self._asked = True
        flag = torch.tensor([self._reason(self.reserve_s + step_s)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        reason = int(flag)
        if not reason:
            return
        self.why = REASONS[reason]
        for number, index in SIGNALS.items():
            if index == reason and not self._received and self._writer is not None:
                os.write(self._writer, bytes([number | AGREED]))  # another rank's signal starts this rank's timeout too
        raise StopRequested

    # inside

    def _reason(self, need_s: float) -> int:
        if self._received:
            return self._received
        now = time.monotonic()
        return max((REASONS.index(name) for name, end in self.ends.items() if now + need_s >= end), default=0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number in URGENT and not self._asked and not self._is_ending:
            self._is_ending = True
            signals.exit_on_signal(number, frame, REQUEUE)

    def _listen(self, reader: int) -> None:
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                self.abort(f"not finished within {self._allowed}", f". Raise {self._timeout_key}")
            numbers = os.read(reader, 64)
            if not numbers:
                return
            for number in numbers:
                if number & ~AGREED in SIGNALS:
                    self._receive(signal.Signals(number & ~AGREED), directly=not number & AGREED)

    def _receive(self, number: signal.Signals, *, directly: bool) -> None:
        now = time.monotonic()
        self._received = max(self._received, SIGNALS[number])
        if directly and number in URGENT:
            if self._first_urgent is not None:
                if now - self._first_urgent > REPEAT_S:
                    self.abort("then requested again")
                return
            self._first_urgent = now
        timeout, key = self._timeouts[number], TIMEOUTS[number]
        allowed_s = timeout if number in URGENT else max(timeout, self._needed_s(now))
        if self._deadline is None or now + allowed_s < self._deadline:
            self._deadline, self._timeout_key = now + allowed_s, key
            extended = f"{allowed_s:.0f} s (a step and a checkpoint; {key}={timeout:g})"
            self._allowed = extended if allowed_s > timeout else f"{key}={timeout:g}"
        self._halfway = min(now + timeout / 2, self._deadline)

    def _needed_s(self, now: float) -> float:
        """Returns the time for the current step and its checkpoint, s, which ends before SLURM's time limit."""
        return min(self.step_s + self.reserve_s, self._job_end - EXIT_S - now)
