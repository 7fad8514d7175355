"""Decode state of each running sequence on the device: newest token, position, and sampled tokens.

Addresses of the tensors stay the same, even while their memory is released, so that captured graphs can read them.

Shapes: S rows, T longest response, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.config.config import RolloutConfig
from mrl.engines.native.releasable_memory import tensors_in_range
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import expert_index_dtype

ADVANCING = slice(1, 3)
"""Indices of positions and counts in the combined state tensor."""


@dataclass(frozen=True)
class RoutingFormat:
    """Format of the routing record: the experts that were chosen per token and layer.

    Attributes:
        num_layers: Layers with experts, L.
        top_k: Experts per token, K.
        dtype: Integer type of an expert's index.
    """

    num_layers: int
    top_k: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.num_layers * self.top_k * self.dtype.itemsize


def routing_format(arch: ArchSpec, config: RolloutConfig) -> RoutingFormat | None:
    """Returns the routing record that the config asks for; None: no recording."""
    if not config.enable_rollout_routing_replay or arch.moe is None:
        return None
    return RoutingFormat(len(arch.moe_layers), arch.moe.top_k, expert_index_dtype(arch.moe.num_experts))


class DecodeState:
    """Decode state of all cache rows.

    Attributes:
        tokens_S: Newest token, not yet in the cache.
        positions_S: Position of the newest token in its sequence.
        counts_S: Response tokens so far.
        keys_S: Random stream, from `stream_key`.
        rooms_S: Most response tokens.
        response_ST: Sampled tokens.
        logprobs_ST: Log-probabilities of the sampled tokens, fp32.
        routed_SLK: Output of the forward: experts of each row's newest token; None without a routing record.
    """

    def __init__(
        self, num_rows: int, max_tokens: int, device: torch.device, record: RoutingFormat | None = None
    ) -> None:
        """Allocates the state; `record` is the format of the routing record."""
        self.shape = (num_rows, max_tokens)
        wanted = [
            ((5, num_rows), torch.int64),
            ((num_rows,), torch.int64),
            ((num_rows, max_tokens), torch.int64),
            ((num_rows, max_tokens), torch.float32),
        ]
        if record is not None:
            shape_LK = (record.num_layers, record.top_k)
            wanted += [((num_rows, *shape_LK), record.dtype), ((num_rows, max_tokens, *shape_LK), record.dtype)]
        self._range, (self._state_5S, self._index_S, self.response_ST, self.logprobs_ST, *routed) = tensors_in_range(
            wanted, device
        )
        self.tokens_S, self.positions_S, self.counts_S, self.keys_S, self.rooms_S = self._state_5S.unbind()
        self.routed_SLK: Tensor | None = None
        if record is not None:
            self.routed_SLK, self._routed_STLK = routed
        self._number()

    def _number(self) -> None:
        torch.arange(self.shape[0], out=self._index_S)

    def wake(self) -> None:
        """Allocates the memory again that `sleep` released; all rows are then empty."""
        if self._range.take(self._range.num_bytes):
            self._number()

    def sleep(self) -> None:
        """Releases the memory; the rows must not be used until `wake`."""
        self._range.release()

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address and shape of the state, on which captured graphs depend."""
        return self._state_5S.data_ptr(), *self.shape

    def begin(
        self, rows: Sequence[int], prompt_lens: Sequence[int], keys: Sequence[int], rooms: Sequence[int]
    ) -> Tensor:
        """Resets rows in which a response starts and returns their index; `positions_S` is the last prompt token's."""
        device = self.tokens_S.device
        index = torch.tensor(rows, device=device)
        self.positions_S[index] = torch.tensor(prompt_lens, device=device) - 1
        self.counts_S[index] = 0
        self.keys_S[index] = torch.tensor(keys, device=device)
        self.rooms_S[index] = torch.tensor(rooms, device=device)
        return index

    def restore(self, row: int, response: Sequence[int], logprobs: Sequence[float]) -> None:
        """Sets the tokens that a resumed response has already."""
        count, device = len(response), self.tokens_S.device
        self.response_ST[row, :count] = torch.tensor(response, device=device)
        self.logprobs_ST[row, :count] = torch.tensor(logprobs, dtype=torch.float32, device=device)
        self.counts_S[row] = count

    def append(self, index: Tensor | slice, tokens: Tensor, logprobs: Tensor) -> None:
        """Appends the next token of each of the given rows."""
        counts = self.counts_S[index]
        rows = self._index_S[index]
        self.response_ST[rows, counts] = tokens
        self.logprobs_ST[rows, counts] = logprobs
        self.tokens_S[index] = tokens
        if isinstance(index, slice):
            self._state_5S[ADVANCING, index].add_(1)  # += would copy the result onto itself
        else:
            self._state_5S[ADVANCING, index] += 1

    def store_candidates(
        self, rows_P: Tensor, offsets_P: Tensor, tokens_P: Tensor, logprobs_P: Tensor, routed_PLK: Tensor | None
    ) -> None:
        """Stores candidate next tokens of rows; `accept` accepts a number of them.

        Args:
            rows_P: Row of each token.
            offsets_P: Index of each token among those of its row.
            tokens_P: Sampled tokens.
            logprobs_P: Log-probabilities of the sampled tokens.
            routed_PLK: Experts of the preceding tokens; None without a routing record.
        """
        counts_P = self.counts_S[rows_P] + offsets_P
        self.response_ST[rows_P, counts_P] = tokens_P
        self.logprobs_ST[rows_P, counts_P] = logprobs_P
        if routed_PLK is not None:
            self._routed_STLK[rows_P, counts_P - 1] = routed_PLK

    def accept(self, taken_B: Tensor) -> None:
        """Accepts the first `taken_B` tokens that were `store_candidates` into each of the first rows."""
        batch = taken_B.numel()
        self.counts_S[:batch] += taken_B
        self.positions_S[:batch] += taken_B
        self.tokens_S[:batch] = self.response_ST[self._index_S[:batch], self.counts_S[:batch] - 1]

    def record_routing(self, batch: int) -> None:
        """Records the experts of the newest tokens of the first `batch` rows, before the next tokens are taken."""
        if self.routed_SLK is not None:
            self._routed_STLK[self._index_S[:batch], self.counts_S[:batch] - 1] = self.routed_SLK[:batch]

    def move(self, source: int, target: int) -> None:
        """Copies the state of row `source` to row `target`."""
        if self.routed_SLK is not None:
            self._routed_STLK[target] = self._routed_STLK[source]
        self._state_5S[:, target] = self._state_5S[:, source]
        self.response_ST[target] = self.response_ST[source]
        self.logprobs_ST[target] = self.logprobs_ST[source]

    def response(self, row: int, start: int = 0, more: int = 0) -> list[int]:
        """Returns the sampled tokens of a row from index `start` on; a negative `start` counts from the end.

        `more` also returns so many of the tokens that were `store_candidates` but not yet accepted.
        """
        count = int(self.counts_S[row]) + more
        found: list[int] = self.response_ST[row, max(0, count + start if start < 0 else start) : count].tolist()
        return found

    def routed(self, row: int) -> Tensor:
        """Returns the experts of a row's sampled tokens [count, L, K] on the CPU; -1 for the last, which is not fed."""
        found: Tensor = self._routed_STLK[row, : int(self.counts_S[row])].to("cpu", copy=True)
        found[-1] = -1
        return found

    def tokens_and_logprobs(self, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Returns the sampled tokens and their log-probabilities of each of these rows."""
        if not rows:
            return []
        index = torch.tensor(rows, device=self.tokens_S.device)
        counts = self.counts_S[index].tolist()
        most = max(counts)
        said = counts, self.response_ST[index, :most].tolist(), self.logprobs_ST[index, :most].tolist()
        return [(tokens[:count], logprobs[:count]) for count, tokens, logprobs in zip(*said, strict=True)]
