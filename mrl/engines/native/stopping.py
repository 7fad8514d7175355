"""When a response ends: a stop token, a stop string or its length.

Owns that decision. The device answers for tokens and length; strings are looked for on the host, in the decoded tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.engines.base import SamplingConfig
from mrl.engines.native.decode_state import Rows
from mrl.types import FinishReason

TAIL_TOKENS = 8
"""Tokens decoded before those that a stop string can span: a tokenizer may need context to decode them."""


class Stopping:
    """The end of responses under one `SamplingConfig`.

    Args:
        sampling: Stop tokens, stop strings.
        decode: Token ids -> text.
        device: Where tokens are.
    """

    def __init__(self, sampling: SamplingConfig, decode: Callable[[Sequence[int]], str], device: torch.device) -> None:
        ends = () if sampling.ignore_eos else sampling.stop_token_ids
        self._stop_ids = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self._stop_set = set(ends)
        self._strings = () if sampling.ignore_eos else tuple(text for text in sampling.stop if text)
        self._decode = decode
        # each token of a stop string has at least one of its bytes
        self._tail = TAIL_TOKENS + max((len(text.encode()) for text in self._strings), default=0)

    def ended(self, tokens_P: Tensor, counts_P: Tensor, rooms_P: Tensor) -> Tensor:
        """Which tokens end their response by what they are, or by its length, bool.

        Args:
            tokens_P: Drawn.
            counts_P: Tokens of the response with each.
            rooms_P: Tokens that it may have.
        """
        done = counts_P >= rooms_P
        if self._stop_ids.numel():
            done = done | torch.isin(tokens_P, self._stop_ids)
        return done

    def hits_string(self, rows: Rows, row: int, more: int = 0) -> bool:
        """Whether the newest token of a row completed a stop string; with `more`, as `Rows.response`."""
        if not self._strings:
            return False
        tail = self._decode(rows.response(row, -self._tail, more))
        if not any(text in tail for text in self._strings):
            return False
        whole = self._decode(rows.response(row, more=more))
        return any(text in whole for text in self._strings)

    @property
    def has_strings(self) -> bool:
        """Whether `hits_string` can be true."""
        return bool(self._strings)

    def reason(self, response: Sequence[int]) -> FinishReason:
        """Why an ended response ended."""
        if response[-1] in self._stop_set:
            return "stop"
        if self._strings:
            text = self._decode(response)
            if any(string in text for string in self._strings):
                return "stop"
        return "length"
