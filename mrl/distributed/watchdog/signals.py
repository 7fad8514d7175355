"""What ends a process that has nothing to keep: Ctrl-C and the signals of schedulers, from its first line to its last.

Owns the handlers from the first line of `mrl/__main__.py` on, before anything else is imported. What a training run
does with SIGTERM and SIGUSR1 once there is something to keep is in `graceful_stop.py`, which takes all but Ctrl-C over.

    while modules are imported    the process leaves from the handler: what imports may swallow an exception, or wrap it
    inside `raising`              KeyboardInterrupt or Terminated; where that gets lost the process leaves LOST_S later
    after it                      signals change nothing: the status is known and the last message said

It imports nothing that takes time.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses after Ctrl-C and SIGTERM, as a shell counts them."""

REQUEUE = 75
"""Exit status of a run that stopped before its end and goes on when it is started again (sysexits.h: EX_TEMPFAIL)."""

FAILED = 70
"""Exit status of every rank of a job in which one failed, hung or was lost (sysexits.h: EX_SOFTWARE)."""

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)

LOST_S = 10.0
"""A process that is still there so long after a signal has lost its exception: somebody caught it."""

IMPORT = "<frozen importlib._bootstrap>"


class Terminated(BaseException):
    """A signal came where nothing has to be kept: the process ends at once, with `status`."""

    def __init__(self, status: int = TERMINATED, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.status, self.number = status, number


class _Ending:
    """What is known of this process's end."""

    raises = False
    is_training = False
    speaks: Callable[[], bool] = staticmethod(lambda: True)
    to_go_on: Callable[[], str] = staticmethod(str)
    lost: Any = None


def begin(*, is_training: bool) -> dict[int, Any]:
    """Takes the signals over; what was there before, for `give_back`.

    Args:
        is_training: SIGTERM, SIGHUP and SIGUSR1 ask to be started again; for other commands SIGUSR1 means nothing.
    """
    _Ending.raises, _Ending.is_training = False, is_training
    _Ending.speaks, _Ending.to_go_on = lambda: True, str
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is signal.SIG_IGN and number != signal.SIGTERM:
            continue  # as `nohup` and `trap ""` have it
        signal.signal(number, _nothing if number == signal.SIGUSR1 and not is_training else _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher begins its ranks with a block
    return before


def begin_interrupts() -> None:
    """Ctrl-C ends this process at once, with the message of `say`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def raising(speaks: Callable[[], bool], to_go_on: Callable[[], str]) -> Iterator[None]:
    """Inside, a signal raises KeyboardInterrupt or Terminated.

    Args:
        speaks: Whether this process is the one of its job that prints.
        to_go_on: What is added to the message.
    """
    _Ending.speaks, _Ending.to_go_on = speaks, to_go_on
    _Ending.raises = True
    try:
        yield
    finally:
        finish()


def finish() -> None:
    """From here on signals change nothing: this process ends in order."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    found()


def found() -> None:
    """The exception of a signal has come where it belongs."""
    if _Ending.lost is not None:
        _Ending.lost.cancel()
        _Ending.lost = None


def give_back(handlers: dict[int, Any]) -> None:
    """Takes back what `begin` did, in a process that lives on."""
    finish()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def after(handler: Any) -> Any:
    """What follows on another owner's handler: what was there before it, or nothing where that was this file's."""
    return signal.SIG_IGN if handler is _end else handler


def ignore_interrupts() -> None:
    """Ctrl-C changes nothing from here on: the last message was said."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(number: int) -> None:
    """Prints the one message of a process that a signal ends."""
    if _Ending.speaks():
        sys.stderr.write(_message(number))
        sys.stderr.flush()


def _message(number: int) -> str:
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    try:
        more = _Ending.to_go_on()
    except Exception:  # noqa: BLE001 -- that it cannot be told how to go on must not hide what happened
        more = ""
    return f"mrl: {word}.{more}\n"


def end(number: int, frame: FrameType | None, status: int) -> NoReturn:
    """Ends this process from a signal handler: by an exception, or at once where that could get lost."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if _is_importing(frame):
        _leave(number, status)
    import threading

    _Ending.lost = threading.Timer(LOST_S, _leave, (number, status))
    _Ending.lost.daemon = True
    _Ending.lost.start()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(status, number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN it ends with this program, where the process goes on as another one."""


def _end(number: int, frame: FrameType | None) -> None:
    status = REQUEUE if _Ending.is_training else TERMINATED
    if number == signal.SIGINT:
        status = INTERRUPTED
    if not _Ending.raises:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        _leave(number, status)
    end(number, frame, status)


def _leave(number: int, status: int) -> NoReturn:
    try:
        if _Ending.speaks():
            os.write(2, _message(number).encode(errors="backslashreplace"))  # a handler may have cut off a print
        if "mrl.distributed.watchdog.abort" in sys.modules:
            sys.modules["mrl.distributed.watchdog.abort"].leave(status)
    finally:
        os._exit(status)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return True
        frame = frame.f_back
    return False
