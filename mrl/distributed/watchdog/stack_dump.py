"""What the main thread of this process does, seen from another thread.

Owns the reading of its Python frames, whether it waits for other ranks in a collective, and since when in the same one.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType

DEEPEST = 10
"""Frames of a stack that are shown, the innermost ones."""


def main_stack() -> str:
    """The innermost frames of the main thread, as in a traceback."""
    frame = _main_frame()
    return "".join(traceback.format_stack(frame)[-DEEPEST:]).rstrip() if frame is not None else "  (it has no frames)"


def failed_in_collective(error: BaseException) -> bool:
    """Whether an exception came out of a collective: another rank may be the reason."""
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return isinstance(error, RuntimeError) and last is not None and _waits(last.tb_frame.f_code, last.tb_lineno)


class MainThread:
    """The main thread's waiting, looked at every few seconds."""

    def __init__(
        self, *, device_is_busy: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Looks at the main thread of this process.

        Args:
            device_is_busy: Whether the GPU has work left; None: there is none. A GPU's collectives are waited for in
                any line that reads a value of theirs, with the processor busy: the same frames at every look, with
                work left each time, are one wait. Without a GPU the kernel's count of switches tells a thread that has
                slept all the time from one that came back to the same line.
            clock: Seconds.
        """
        self._device_is_busy, self._clock = device_is_busy, clock
        self._seen: tuple[object, ...] = ()
        self._began = 0.0

    def look(self) -> float | None:
        """For how long it has waited in the same collective, as far as the looks so far tell, s; None: it does not."""
        frame = _main_frame()
        works = self._device_is_busy is not None and self._device_is_busy()
        if frame is None or not (works or _waits(frame.f_code, frame.f_lineno)):
            self._seen = ()
            return None
        seen: tuple[object, ...] = tuple((id(one.f_code), one.f_lasti) for one, _ in traceback.walk_stack(frame))
        if self._device_is_busy is None:
            seen += _switches()
        if seen != self._seen:
            self._seen, self._began = seen, self._clock()
        return self._clock() - self._began


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits(code: CodeType, line: int | None) -> bool:
    """Whether a thread whose innermost Python frame is this one waits for other ranks.

    It does inside of torch.distributed, and where it calls `wait` of native code, as of a collective's handle: waits of
    Python's own library are Python code, whose frame would be the innermost.
    """
    path = code.co_filename
    if "/torch/distributed/" in path:
        return "/torch/distributed/checkpoint/" not in path
    return ".wait(" in linecache.getline(path, line or 0)


def _switches() -> tuple[str, ...]:
    """How often the kernel has let the main thread run."""
    status = Path(f"/proc/self/task/{threading.main_thread().native_id}/status").read_text()
    return tuple(row for row in status.splitlines() if "ctxt_switches" in row)
