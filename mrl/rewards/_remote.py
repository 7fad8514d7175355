"""The trainer's end of a worker process: starting it, feeding it, believing it or not, ending it.

Nothing here waits for a worker without a limit: both ends of its pipes are read and written only as far as they go.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mrl.errors import UserError
from mrl.rewards import _wire
from mrl.rewards._call import Outcome
from mrl.rewards._keeper import IGNORED
from mrl.rewards._signatures import Sample

STARTUP_LIMIT_S = 120.0
"""Imports of a worker may take this long: a reward function may import large packages."""

_EXIT_LIMIT_S = 5.0  # from a closed pipe to the end of its processes
_READ_BYTES = 1 << 16
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from mrl.rewards._worker import run; run()"


class Worker:
    """One worker process with its keeper.

    Attributes:
        process: The keeper.
        pending: The samples that it was sent and has not answered.
        deadline: Of the first of them, monotonic s.
        lost: It has ended, or cannot be believed.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], time_limit_s: float, memory_limit_mb: int
    ) -> None:
        """Starts the processes; `wait_ready` waits for them."""
        self._key = secrets.randbits(63)
        commands, self._to = os.pipe()
        self._answers, back = os.pipe()
        # A scheduler signals every process of the job. Until the keeper can ignore it, the signal waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            bounds = (os.getpid(), commands, back, memory_limit_mb, self._key)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, bounds), json.dumps(sys.path)],
                pass_fds=(commands, back),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints must not mix with the trainer's output
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(commands)
            os.close(back)
        os.set_blocking(self._to, False)
        os.set_blocking(self._answers, False)
        self.pending: deque[int] = deque()
        self.lost = False
        self.deadline = 0.0
        self._num_calls = len(calls)
        self._answered = 0
        self._time_limit_s = time_limit_s
        self._started = time.monotonic()
        self._unsent = bytearray(_wire.command([(name, dict(kwargs)) for name, kwargs in calls]))
        self._unread = bytearray()
        self._closed = False  # by the other side
        self._released = False

    def wait_ready(self) -> None:
        """Returns when the functions are imported; raises UserError where they cannot be."""
        while (answer := self._answer()) is None and not self._closed:
            left = self._started + STARTUP_LIMIT_S - time.monotonic()
            if left <= 0:
                self.stop()
                raise UserError(f"reward.functions: a worker did not import them within {STARTUP_LIMIT_S:g} s.")
            wait_for([self], left)
        if answer is None or answer.refusal is None:
            self.stop()
            how = answer.ended if answer is not None and answer.ended else "it wrote into the pipe of its answers"
            raise UserError(f"reward.functions: a worker died while it imported them ({how}).")
        if answer.refusal:
            self.stop()
            raise UserError(answer.refusal)

    def send(self, indices: Sequence[int], samples: Sequence[Sample]) -> bool:
        """Gives an idle worker its next samples; False where it is dead, or has said what it was not asked."""
        self._transfer()
        if self._closed or self._unread or self.process.poll() is not None:
            return False
        self._unsent += _wire.command([samples[index] for index in indices])
        self.pending.extend(indices)
        self.deadline = time.monotonic() + self._time_limit_s
        return True

    def take(self) -> Iterator[tuple[int, list[Outcome]]]:
        """The samples that it has answered or failed, with their outcomes; it may be `lost` then. Does not wait."""
        late = time.monotonic() >= self.deadline
        while self.pending and not self.lost:
            outcomes = self._outcomes(late)
            if outcomes is None:
                return
            late = False
            self.deadline = time.monotonic() + self._time_limit_s
            self.lost = any(outcome.lost for outcome in outcomes)
            self._answered += 1
            yield self.pending.popleft(), outcomes

    def _outcomes(self, late: bool) -> list[Outcome] | None:
        """Of the first pending sample; None: it may take longer."""
        answer = self._answer()
        if answer is not None and answer.outcomes and answer.serial == self._answered:
            return list(answer.outcomes)
        if answer is not None and answer.ended:
            return self._failed(f"the worker process died over it ({answer.ended})")
        if answer is not None:
            return self._failed("something else than the worker wrote into the pipe of its answers")
        if self._closed:
            return self._failed("the worker process died over it, and its keeper too")
        return self._failed(f"it took longer than reward.time_limit_s={self._time_limit_s:g}") if late else None

    def register(self, selector: selectors.BaseSelector) -> None:
        """For what may happen next."""
        selector.register(self._answers, selectors.EVENT_READ)
        if self._unsent:
            selector.register(self._to, selectors.EVENT_WRITE)

    def release(self) -> None:
        """Closes the pipes, upon which the worker and everything that its functions started end."""
        if not self._released:
            os.close(self._to)
            os.close(self._answers)
        self._released = True

    def stop(self) -> None:
        """Returns when they have ended."""
        self.release()
        try:
            self.process.wait(timeout=_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _failed(self, problem: str) -> list[Outcome]:
        return [Outcome(math.nan, problem, lost=True)] * self._num_calls

    def _answer(self) -> _wire.Answer | None:
        """The next line, if a whole one is there; a line that says nothing is an Answer that does."""
        self._transfer()
        while True:
            line, end, rest = self._unread.partition(b"\n")
            if not end:
                return _wire.Answer() if len(line) > _wire.MAX_LINE_BYTES else None
            self._unread = rest
            if line:
                return _wire.read(bytes(line), self._key, self._num_calls) or _wire.Answer()

    def _transfer(self) -> None:
        """Writes and reads what goes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        try:
            while len(self._unread) <= _wire.MAX_LINE_BYTES:
                found = os.read(self._answers, _READ_BYTES)
                if not found:
                    self._closed = True
                    break
                self._unread += found
        except BlockingIOError:
            pass


def wait_for(workers: Iterable[Worker], seconds: float) -> None:
    """Returns when one of the workers may have said something or takes in something, or after that time."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            worker.register(selector)
        selector.select(max(0.0, seconds))
