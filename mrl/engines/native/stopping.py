"""Stop conditions of a response: stop token, stop string, or length.

Tokens and length are checked on the device; strings on the host, in the decoded tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.engines.base import SamplingConfig
from mrl.engines.native.decode_state import DecodeState
from mrl.types import FinishReason

TAIL_TOKENS = 8
"""Tokens decoded before those that a stop string can span: a tokenizer may need context to decode them."""


class Stopping:
    """Stop conditions of one `SamplingConfig`.

    Args:
        sampling: Supplies stop tokens and stop strings.
        decode: Converts token ids to text.
        device: Device of the tokens.
    """

    def __init__(self, sampling: SamplingConfig, decode: Callable[[Sequence[int]], str], device: torch.device) -> None:
        ends = () if sampling.ignore_eos else sampling.stop_token_ids
        self._stop_ids = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self._stop_set = set(ends)
        self._strings = () if sampling.ignore_eos else tuple(text for text in sampling.stop if text)
        self._decode = decode
        # each token of a stop string contains at least one of its bytes
        self._tail = TAIL_TOKENS + max((len(text.encode()) for text in self._strings), default=0)

    def is_finished(self, tokens_P: Tensor, counts_P: Tensor, rooms_P: Tensor) -> Tensor:
        """Returns which tokens end their response by their id or its length, bool.

        Args:
            tokens_P: Sampled tokens.
            counts_P: Length of the response including each token.
            rooms_P: Longest response, tokens.
        """
        done = counts_P >= rooms_P
        if self._stop_ids.numel():
            done = done | torch.isin(tokens_P, self._stop_ids)
        return done

    def ends_with_stop_string(self, rows: DecodeState, row: int, more: int = 0) -> bool:
        """Returns whether the newest token of a row completed a stop string; for `more` see `DecodeState.response`."""
        if not self._strings:
            return False
        tail = self._decode(rows.response(row, -self._tail, more))
        if not any(text in tail for text in self._strings):
            return False
        complete = self._decode(rows.response(row, more=more))
        return any(text in complete for text in self._strings)

    @property
    def has_strings(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._strings)

    def reason(self, response: Sequence[int]) -> FinishReason:
        """Returns the finish reason of an ended response."""
        if response[-1] in self._stop_set:
            return "stop"
        if self._strings:
            text = self._decode(response)
            if any(string in text for string in self._strings):
                return "stop"
        return "length"
