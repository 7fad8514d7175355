"""One answer while it is generated: its tokens so far, the text that may be told, and why it ended.

Owns stop strings, which an answer is told without, and that no character is told in halves. It knows no engine and no
HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.algorithms.functional.sampling import stream_key
from mrl.types import FinishReason

HALF = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled.

    Attributes:
        max_tokens: It ends after so many.
        temperature: 0: the most likely token.
        top_k: -1: all.
        top_p: (0, 1].
        min_p: [0, 1).
        seed: Of its random numbers.
        stop: Strings that end it; they are not part of its text.
        ignore_eos: The model's end tokens do not end it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Delta:
    """What is new of an answer.

    Attributes:
        text: Follows what was told before.
        ids: Its new tokens, an end token among them.
        logprobs: Of each of them, nats, under the distribution that it was drawn from.
        finish_reason: None: more follows.
        error: Why the answer failed; the other fields are empty.
        status: Of HTTP, where it failed.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    status: int = 503


class Answer:
    """One answer to one prompt.

    Attributes:
        prompt_ids: What is answered.
        sampling: How.
        index: Which of the answers to its prompt it is; each has random numbers of its own.
        cancelled: Whether its client has left; it gets no further tokens.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        index: int,
        decode: Callable[[Sequence[int]], str],
        tell: Callable[[Delta], object],
    ) -> None:
        """No tokens yet.

        Args:
            prompt_ids: See above.
            sampling: See above.
            index: See above.
            decode: Token ids -> the text of them that is told.
            tell: Takes each piece; called in the thread that generates.
        """
        self.prompt_ids, self.sampling, self.index = tuple(prompt_ids), sampling, index
        self.cancelled = False
        self._decode, self._tell = decode, tell
        self._ids: list[int] = []
        self._num_parts = 0
        self._told = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and all tokens so far: what is read next."""
        return (*self.prompt_ids, *self._ids)

    @property
    def remaining(self) -> int:
        """Tokens that it may still get."""
        return self.sampling.max_tokens - len(self._ids)

    def next_uid(self) -> int:
        """Name of the next part's random numbers, not negative; they depend on the seed, the index and the part."""
        self._num_parts += 1
        return stream_key(self.sampling.seed, self.index, self._num_parts) & (1 << 62) - 1

    def take(self, ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> bool:
        """Adds tokens, tells what can be told, and says whether the answer is over.

        Args:
            ids: Generated after `ids`; those beyond `max_tokens` are dropped.
            logprobs: Of each.
            ended: With an end token.
        """
        before, room = len(self._ids), self.remaining
        reason: FinishReason | None = "stop" if ended and len(ids) <= room else None
        self._ids += ids[:room]
        text = self._decode(self._ids)
        cut = self._stop_at(text)
        if cut is not None:
            reason = "stop"
            del self._ids[self._tokens_until(text[: cut[1]], before) :]
            text = text[: cut[0]]
        elif reason is None and not self.remaining:
            reason = "length"
        end = len(text) if reason else self._safe_end(text)
        told, self._told = text[self._told : end], max(self._told, end)
        new = len(self._ids) - before
        self._tell(Delta(told, tuple(self._ids[before:]), tuple(logprobs[:new]), reason))
        return reason is not None

    def fail(self, why: str, status: int) -> None:
        """Ends the answer with an error.

        Args:
            why: For the client.
            status: Of HTTP.
        """
        self._tell(Delta(error=why, status=status))

    def _stop_at(self, text: str) -> tuple[int, int] | None:
        """Where the stop string that is complete first begins and ends; None: there is none."""
        found = [(at, at + len(stop)) for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return min(found, key=lambda cut: (cut[1], cut[0]), default=None)

    def _tokens_until(self, text: str, before: int) -> int:
        """The fewest tokens, more than `before`, that have this text."""
        for count in range(before + 1, len(self._ids)):
            if self._decode(self._ids[:count]).startswith(text):
                return count
        return len(self._ids)

    def _safe_end(self, text: str) -> int:
        """How much of a text that goes on can be told: no half character, and nothing that a stop string may begin."""
        whole = len(text.rstrip(HALF))
        for stop in self.sampling.stop:
            for size in range(min(len(stop) - 1, whole), 0, -1):
                if text[:whole].endswith(stop[:size]):
                    whole -= size
                    break
        return whole
