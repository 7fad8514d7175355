"""The watch over the event loop, as `hang_detector.py` has it: it fires where no checkpoint comes within its time.

Its time is 300 s, and in a test that of the fault `hang`.
"""

import threading
from contextlib import contextmanager

from tensorrt_llm.faults import fault

TIMEOUT_S = 300


class HangDetector:
    def __init__(self, timeout=None, on_detected=None):
        self.timeout = float(fault("hang") or timeout or TIMEOUT_S)
        self.on_detected = on_detected
        self.task = None
        self.active = False
        self._detected = threading.Event()

    def _detect_hang(self):
        self._detected.set()
        self.on_detected()

    def detected(self):
        return self._detected.is_set()

    def checkpoint(self):
        self.cancel_task()
        if self.active:
            self.task = threading.Timer(self.timeout, self._detect_hang)
            self.task.daemon = True
            self.task.start()

    def cancel_task(self):
        if self.task is not None:
            self.task.cancel()
            self.task = None

    @contextmanager
    def pause(self):
        try:
            self.cancel_task()
            yield
        finally:
            self.checkpoint()

    def __enter__(self):
        self.active = True
        return self

    def __exit__(self, *raised):
        self.active = False
        self.cancel_task()
