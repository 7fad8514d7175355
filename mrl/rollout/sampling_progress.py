"""Progress of a sampling phase for the console: prompts done, tokens per second, estimated time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

INTERVAL_S = 1.0
"""Shortest time between two messages, s."""


class SamplingProgress:
    """Progress of this replica's current sampling phase.

    Args:
        show: Receives a message, at most one each `INTERVAL_S`.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._is_open = False
        self._num_tokens = self._num_prompts = self._num_samples = self._num_done = 0
        self._expected_tokens = self._began = self._shown = 0.0
        self._where = ""
        self._counts: Counter[int] = Counter()

    @contextmanager
    def of(self, num_prompts: int, num_samples: int, expected_tokens: float, where: str = "") -> Iterator[None]:
        """Counts what `record` receives inside the block.

        Args:
            num_prompts: Prompts of this replica.
            num_samples: Samples per prompt.
            expected_tokens: Expected response tokens of all samples.
            where: Addition to each message, such as " (replica 1 of 4)".
        """
        self._num_prompts, self._num_samples, self._expected_tokens = num_prompts, num_samples, expected_tokens
        self._num_tokens = self._num_done = 0
        self._counts.clear()
        self._where = where
        self._began = self._shown = time.monotonic()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def record(self, num_tokens: int, finished_uids: Sequence[int]) -> None:
        """Adds sampled tokens, and finished samples by the uid of their prompt; the engine calls it often."""
        if not self._is_open:
            return
        self._num_tokens += num_tokens
        for uid in finished_uids:
            self._counts[uid] += 1
            self._num_done += self._counts[uid] == self._num_samples
        now = time.monotonic()
        if now - self._shown >= INTERVAL_S:
            self._shown = now
            self._show(self.describe(now - self._began))

    def describe(self, elapsed_s: float) -> str:
        """Returns the message after `elapsed_s` seconds.

        The time left assumes the current speed and the expected number of tokens; there is none before the first token
        or after that number.
        """
        rate = self._num_tokens / elapsed_s
        left = self._expected_tokens - self._num_tokens
        words = [f"{self._num_done} of {self._num_prompts} prompts{self._where}", f"{rate:,.0f} tokens/s"]
        return ", ".join([*words, *([f"about {left / rate:,.0f} s left"] if rate and left > 0 else [])])
