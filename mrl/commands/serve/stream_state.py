"""State of one answer while it is generated: its tokens, the text that may be sent, and its end.

Stop strings are removed from the text, and a character is sent only once all of its bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.algorithms.functional.sampling import stream_key
from mrl.types import FinishReason

REPLACEMENT_CHAR = "\ufffd"
"""Character that a decoder returns for invalid or incomplete bytes."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer.

    Attributes:
        max_tokens: Longest answer, tokens.
        temperature: Temperature; 0: greedy.
        top_k: Number of most likely tokens to sample from; -1: all.
        top_p: Probability mass to sample from, (0, 1].
        min_p: Smallest probability relative to the most likely token, [0, 1).
        seed: Seed of the random numbers.
        stop: Strings that end the answer and are not part of it.
        ignore_eos: Continue after the model's end tokens.
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
    """Next piece of an answer, or its error.

    Attributes:
        text: Text that follows what was sent before.
        ids: New tokens, including an end token.
        logprobs: Log-probability of each new token under the sampling distribution, nats.
        finish_reason: Reason of the end; None: more follows.
        error: Error of a failed answer; the fields above are empty.
        status: HTTP status of the error.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    status: int = 503


class StreamedAnswer:
    """One answer to one prompt.

    Attributes:
        prompt_ids: Token ids of the prompt.
        sampling: Sampling parameters.
        index: Index among the answers to the prompt; each has its own random numbers.
        cancelled: True once the client has disconnected; the answer gets no more tokens.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        index: int,
        decode: Callable[[Sequence[int]], str],
        emit: Callable[[Delta], object],
    ) -> None:
        """Creates an answer without tokens.

        Args:
            prompt_ids: Token ids of the prompt.
            sampling: Sampling parameters.
            index: Index among the answers to the prompt.
            decode: Returns the text to send for token ids.
            emit: Receives each piece, in the thread that generates.
        """
        self.prompt_ids, self.sampling, self.index = tuple(prompt_ids), sampling, index
        self.cancelled = False
        self._decode, self._emit = decode, emit
        self._ids: list[int] = []
        self._num_rounds = 0
        self._emitted = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and all tokens so far, the prompt of the next round."""
        return (*self.prompt_ids, *self._ids)

    @property
    def remaining(self) -> int:
        """Number of tokens that the answer may still get."""
        return self.sampling.max_tokens - len(self._ids)

    def next_uid(self) -> int:
        """Returns the uid of the next round's random numbers, from seed, index and round; not negative."""
        self._num_rounds += 1
        return stream_key(self.sampling.seed, self.index, self._num_rounds) & (1 << 62) - 1

    def add_tokens(self, ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> bool:
        """Adds tokens, emits the text that is final, and returns whether the answer has ended.

        Args:
            ids: Generated tokens; those beyond `max_tokens` are dropped.
            logprobs: Log-probability of each.
            ended: An end token was generated.
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
        new_text, self._emitted = text[self._emitted : end], max(self._emitted, end)
        new = len(self._ids) - before
        self._emit(Delta(new_text, tuple(self._ids[before:]), tuple(logprobs[:new]), reason))
        return reason is not None

    def fail(self, why: str, status: int) -> None:
        """Ends the answer with an error message and an HTTP status."""
        self._emit(Delta(error=why, status=status))

    def _stop_at(self, text: str) -> tuple[int, int] | None:
        """Returns start and end of the stop string that completes first; None: there is none."""
        found = [(at, at + len(stop)) for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return min(found, key=lambda cut: (cut[1], cut[0]), default=None)

    def _tokens_until(self, text: str, before: int) -> int:
        """Returns the smallest number of tokens, more than `before`, whose text starts with `text`."""
        for count in range(before + 1, len(self._ids)):
            if self._decode(self._ids[:count]).startswith(text):
                return count
        return len(self._ids)

    def _safe_end(self, text: str) -> int:
        """Returns how much of the text is final, without incomplete characters and possible starts of a stop string."""
        end = len(text.rstrip(REPLACEMENT_CHAR))
        for stop in self.sampling.stop:
            for size in range(min(len(stop) - 1, end), 0, -1):
                if text[:end].endswith(stop[:size]):
                    end -= size
                    break
        return end
