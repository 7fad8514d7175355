"""Attention over the KV cache, for prefill chunks and for decoding: one object per forward, called once per layer.

Shapes: P packed tokens, B decoding sequences (rows 0 .. B-1 of the cache), N heads, K KV heads, G = N / K, T slots, D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.kv_cache import KVCache
from mrl.models.kernels.bindings import Library
from mrl.models.kernels.sdpa import attend


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt positions `start` .. `stop` - 1 of the sequence in cache row `row`, in one prefill forward."""

    row: int
    start: int
    stop: int

    @property
    def extent(self) -> tuple[int, int]:
        """Position range; chunks with equal ranges are computed together."""
        return self.start, self.stop


class PrefillAttention:
    """Causal attention of prompt chunks; the packed tokens are those of `chunks` in order.

    Args:
        cache: KV cache with the keys and values before each chunk.
        chunks: Prompt chunks, sorted by `extent`.
        compiled: Compiled kernels that compute each token as if it were decoded; None: PyTorch operators, chunks of
            equal extent together.
    """

    def __init__(self, cache: KVCache, chunks: Sequence[PrefillChunk], compiled: Library | None = None) -> None:
        device = cache.device
        self._cache, self._compiled = cache, compiled
        self.positions_P = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(device)
        counts = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        self._rows_P = torch.tensor([chunk.row for chunk in chunks]).repeat_interleave(counts).to(device)
        self._parts: list[AlikeChunks] = []
        window = next((each for each in cache.windows if each is not None), None)
        self._windowed: list[AlikeChunks] = []
        for (start, stop), members in groupby(chunks, key=lambda chunk: chunk.extent):
            rows = torch.tensor([chunk.row for chunk in members], device=device)
            self._parts.append(_part(start, stop, rows, None))
            if window is not None:
                self._windowed.append(_part(start, stop, rows, window))

    def __call__(
        self, layer: int, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Stores keys and values in the cache and returns the attention output [P, N, D]; sinks: see `attend`."""
        keys, values, window = self._cache.keys[layer], self._cache.values[layer], self._cache.windows[layer]
        slots_P = self.positions_P if window is None else self.positions_P % keys.size(2)
        keys[self._rows_P, :, slots_P] = k_PKD
        if not self._cache.keys_only:
            values[self._rows_P, :, slots_P] = v_PKD
        if self._compiled is not None:
            where = self._rows_P, self.positions_P, keys, values
            return self._compiled.attend_at(q_PND, *where, window=window, scale=self._cache.scale, sinks_N=sinks_N)
        outputs = []
        first = 0
        for part in self._parts if window is None else self._windowed:
            count = part.stop - part.start
            last = first + part.rows.numel() * count
            new, stored = [q_PND, k_PKD, v_PKD], [keys, values]
            if self._cache.keys_only:
                new, stored = new[:-1], stored[:-1]
            q, k, *v = (x[first:last].view(-1, count, *x.shape[1:]).transpose(1, 2) for x in new)
            if part.start:
                k, *v = (_slots(x, part) for x in stored)
            attended = attend(q, k, v[0] if v else k, part.mask, self._cache.scale, sinks=sinks_N)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
            first = last
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True)
class AlikeChunks:
    """Chunks of equal extent.

    Attributes:
        start: First position of the chunks.
        stop: Position after the last.
        rows: Cache row of each chunk.
        first: First position whose key is seen.
        mask: True where a query sees a key of the positions from `first` on, [queries, keys]; None: causal.
    """

    start: int
    stop: int
    rows: Tensor
    first: int
    mask: Tensor | None


def _part(start: int, stop: int, rows: Tensor, window: int | None) -> AlikeChunks:
    """Returns chunks that extend from `start` to `stop`, of a layer with this sliding window."""
    first = 0 if window is None else max(0, start - window + 1)
    mask = None
    if start or (window is not None and stop > window):
        query = torch.arange(start, stop, device=rows.device)[:, None]
        key = torch.arange(first, stop, device=rows.device)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    return AlikeChunks(start, stop, rows, first, mask)


def _slots(cached: Tensor, part: AlikeChunks) -> Tensor:
    """Returns keys or values of the positions that the chunks see, [chunks, K, positions, D]."""
    slots = cached.size(2)
    if part.stop <= slots:
        return cached[part.rows, :, part.first : part.stop]
    index = torch.arange(part.first, part.stop, device=cached.device) % slots
    return cached[part.rows[:, None], :, index].transpose(1, 2)


class DecodeAttention:
    """Attention of one new token in each of the first B rows, over the first `length` slots, or all slots of a ring.

    Args:
        cache: KV cache with the keys and values before the new tokens.
        positions_B: Position of each row's new token, int64, below `length`.
        length: Slots to read; slots after a row's own position are masked.
        num_heads: N.
    """

    def __init__(self, cache: KVCache, positions_B: Tensor, length: int, num_heads: int) -> None:
        self._cache = cache
        self._length = length
        self._positions_B = positions_B
        self._rows_B = torch.arange(positions_B.numel(), device=positions_B.device)
        self._on_cpu = positions_B.device.type == "cpu"
        self._groups = num_heads // cache.num_kv_heads
        self._masks: dict[int | None, Tensor] = {}
        for window, keys in zip(cache.windows, cache.keys, strict=True):
            if window not in self._masks:
                self._masks[window] = self._mask(window, min(length, keys.size(2)), keys)

    def _mask(self, window: int | None, num_slots: int, keys: Tensor) -> Tensor:
        """Returns the additive mask of a layer: -inf at the slots that a row's new token does not see."""
        slot_T = torch.arange(num_slots, device=keys.device)
        if window is None:
            hidden_BT = slot_T > self._positions_B[:, None]
        else:  # the age of the token in a slot; negative if the slot is empty
            age_BT = (self._positions_B[:, None] - slot_T) % keys.size(2)
            hidden_BT = (age_BT >= window) | (age_BT > self._positions_B[:, None])
        mask_BT = torch.zeros(hidden_BT.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden_BT, -torch.inf)
        mask_BKGT = mask_BT[:, None, None].expand(-1, self._cache.num_kv_heads, self._groups, -1)
        return mask_BKGT.flatten(0, 1) if self._on_cpu else mask_BKGT

    def __call__(
        self, layer: int, q_BND: Tensor, k_BKD: Tensor, v_BKD: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Stores keys and values in the cache and returns the attention output [B, N, D]; sinks: see `attend`."""
        batch, heads, dim = q_BND.shape
        kv_heads = k_BKD.size(1)
        keys, values, window = self._cache.keys[layer], self._cache.values[layer], self._cache.windows[layer]
        slots_B, mask = self._positions_B if window is None else self._positions_B % keys.size(2), self._masks[window]
        keys[self._rows_B, :, slots_B] = k_BKD
        if not self._cache.keys_only:
            values[self._rows_B, :, slots_B] = v_BKD
        keys, values = keys[:batch, :, : self._length], values[:batch, :, : self._length]
        q_BKGD = q_BND.reshape(batch, kv_heads, -1, dim)
        if not self._on_cpu:
            scale = self._cache.scale
            if sinks_N is not None:
                return attend(q_BND[:, :, None], keys, values, mask[:, :1, :1], scale, sinks=sinks_N).squeeze(2)
            return F.scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)
        # torch's CPU attention is slow for a single query; two batched matrix products over views are faster
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scale = dim**-0.5 if self._cache.scale is None else self._cache.scale
        scores = torch.baddbmm(mask, q_BKGD.flatten(0, 1), keys.transpose(1, 2), alpha=scale)
        attended = torch.bmm(scores.softmax(-1), values).view(batch, heads, dim)
        if sinks_N is None:
            return attended
        kept = (scores.float().logsumexp(-1).view(batch, heads) - sinks_N.float()).sigmoid()
        return attended * kept[..., None].to(attended.dtype)
