"""State of the main thread, read from another thread: its stack, and how long it has waited in a collective."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType

MAX_FRAMES = 10
"""Number of innermost frames shown of a stack."""


def main_stack() -> str:
    """Returns the innermost frames of the main thread, formatted as in a traceback."""
    frame = _main_frame()
    return (
        "".join(traceback.format_stack(frame)[-MAX_FRAMES:]).rstrip() if frame is not None else "  (it has no frames)"
    )


def failed_in_collective(error: BaseException) -> bool:
    """Returns whether an exception was raised by a collective, so that another rank may be the cause."""
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return (
        isinstance(error, RuntimeError) and last is not None and _is_in_collective(last.tb_frame.f_code, last.tb_lineno)
    )


class MainThreadMonitor:
    """Detector of long waits of the main thread, polled every few seconds."""

    def __init__(
        self, *, device_is_busy: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts without history.

        Args:
            device_is_busy: Returns whether the GPU has pending work; None: no GPU. With a GPU, a line that reads a
                collective's result blocks in native code with the CPU busy: equal stacks with pending work at every
                poll count as one wait. Without a GPU, the kernel's count of context switches distinguishes a thread
                that slept all the time from one that returned to the same line.
            clock: Monotonic time, s.
        """
        self._device_is_busy, self._clock = device_is_busy, clock
        self._seen: tuple[object, ...] = ()
        self._began = 0.0

    def poll(self) -> float | None:
        """Polls the main thread and returns how long it has been in the same collective, s; None if it is in none."""
        frame = _main_frame()
        gpu_works = self._device_is_busy is not None and self._device_is_busy()
        if frame is None or not (gpu_works or _is_in_collective(frame.f_code, frame.f_lineno)):
            self._seen = ()
            return None
        seen: tuple[object, ...] = tuple((id(one.f_code), one.f_lasti) for one, _ in traceback.walk_stack(frame))
        if self._device_is_busy is None:
            seen += _context_switches()
        if seen != self._seen:
            self._seen, self._began = seen, self._clock()
        return self._clock() - self._began


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_in_collective(code: CodeType, line: int | None) -> bool:
    """Returns whether a thread with this innermost Python frame waits for other ranks.

    It does inside of torch.distributed, and in a line that calls a native `wait`, such as a collective's handle. Waits
    of Python's own library are Python code, so they would be the innermost frame themselves.
    """
    path = code.co_filename
    if "/torch/distributed/" in path:
        return "/torch/distributed/checkpoint/" not in path
    return ".wait(" in linecache.getline(path, line or 0)


def _context_switches() -> tuple[str, ...]:
    """Returns the main thread's counts of context switches, as text lines."""
    status = Path(f"/proc/self/task/{threading.main_thread().native_id}/status").read_text()
    return tuple(row for row in status.splitlines() if "ctxt_switches" in row)
