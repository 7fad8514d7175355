"""Signal handlers of a process that has nothing to save: Ctrl-C and the schedulers' signals end it.

`mrl/__main__.py` installs them before it imports anything else, so this file imports only modules that load fast.
`graceful_stop.py` takes over all but Ctrl-C once a training run has something to save.

    while modules are imported    the handler exits: code in an import may swallow or wrap an exception inside
    `raise_on_signals`              KeyboardInterrupt or Terminated; if that gets lost, the process exits LOST_S later
    after it                      signals are ignored: the exit status is known and the last message printed
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED, TERMINATED = 130, 143  # 128 + signal: exit statuses after Ctrl-C and SIGTERM

REQUEUE = 75
"""Exit status of a run that stopped early and continues when it is started again (sysexits.h: EX_TEMPFAIL)."""

FAILED = 70
"""Exit status of every rank of a job in which one failed, hung or was lost (sysexits.h: EX_SOFTWARE)."""

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)

LOST_S = 10.0
"""Time after a signal within which its exception must arrive, s; otherwise some code has caught it."""

IMPORT = "<frozen importlib._bootstrap>"


class Terminated(BaseException):
    """Raised for a signal that ends the process at once, with exit status `status`."""

    def __init__(self, status: int = TERMINATED, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.status, self.number = status, number


class _State:
    """Process-wide state of the handlers."""

    raises = False
    is_training = False
    prints: Callable[[], bool] = staticmethod(lambda: True)
    resume_hint: Callable[[], str] = staticmethod(str)
    lost_timer: Any = None


def install_handlers(*, is_training: bool) -> dict[int, Any]:
    """Installs the handlers and returns the previous ones for `restore_handlers`.

    Args:
        is_training: SIGTERM, SIGHUP and SIGUSR1 exit with REQUEUE; for other commands SIGUSR1 is ignored.
    """
    _State.raises, _State.is_training = False, is_training
    _State.prints, _State.resume_hint = lambda: True, str
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is signal.SIG_IGN and number != signal.SIGTERM:
            continue  # ignored by `nohup` or `trap ""`
        signal.signal(number, _ignore if number == signal.SIGUSR1 and not is_training else _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts its ranks with these blocked
    return before


def install_interrupt_handler() -> None:
    """Makes Ctrl-C end this process at once with a message."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def raise_on_signals(prints: Callable[[], bool], resume_hint: Callable[[], str]) -> Iterator[None]:
    """Makes signals raise KeyboardInterrupt or Terminated inside the block.

    Args:
        prints: Returns whether this process prints the job's message.
        resume_hint: Returns text to append to the message.
    """
    _State.prints, _State.resume_hint = prints, resume_hint
    _State.raises = True
    try:
        yield
    finally:
        ignore_signals()


def ignore_signals() -> None:
    """Ignores signals from here on, since the process is shutting down."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    cancel_forced_exit()


def cancel_forced_exit() -> None:
    """Cancels the forced exit, because the exception of a signal was caught where it should be."""
    if _State.lost_timer is not None:
        _State.lost_timer.cancel()
        _State.lost_timer = None


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Restores the handlers from before `install_handlers`, in a process that continues."""
    ignore_signals()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def handler_to_restore(handler: Any) -> Any:
    """Returns the handler to install after another one is removed: `handler`, or SIG_IGN if it is this file's."""
    return signal.SIG_IGN if handler is _end else handler


def ignore_interrupts() -> None:
    """Ignores Ctrl-C from here on, because the last message was printed."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def print_signal_message(number: int) -> None:
    """Prints the message of a process that a signal ends."""
    if _State.prints():
        sys.stderr.write(_message(number))
        sys.stderr.flush()


def _message(number: int) -> str:
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    try:
        more = _State.resume_hint()
    except Exception:  # noqa: BLE001 -- missing advice must not hide the message
        more = ""
    return f"mrl: {word}.{more}\n"


def exit_on_signal(number: int, frame: FrameType | None, status: int) -> NoReturn:
    """Ends this process from a signal handler: by an exception, or at once where that could get lost."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if _is_importing(frame):
        _leave(number, status)
    import threading

    _State.lost_timer = threading.Timer(LOST_S, _leave, (number, status))
    _State.lost_timer.daemon = True
    _State.lost_timer.start()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(status, number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing; unlike SIG_IGN it is reset when the process executes another program."""


def _end(number: int, frame: FrameType | None) -> None:
    status = REQUEUE if _State.is_training else TERMINATED
    if number == signal.SIGINT:
        status = INTERRUPTED
    if not _State.raises:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        _leave(number, status)
    exit_on_signal(number, frame, status)


def _leave(number: int, status: int) -> NoReturn:
    try:
        if _State.prints():
            os.write(2, _message(number).encode(errors="backslashreplace"))  # the signal may have interrupted a print
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
