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
        device = cache.keys[0].device
        self._cache, self._compiled = cache, compiled
        self.positions_P = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(device)
        counts = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        self._rows_P = torch.tensor([chunk.row for chunk in chunks]).repeat_interleave(counts).to(device)
        self._parts = []
        for (start, stop), members in groupby(chunks, key=lambda chunk: chunk.extent):
            rows = torch.tensor([chunk.row for chunk in members], device=device)
            mask = None
            if start:
                mask = torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start)
            self._parts.append((start, stop, rows, mask))

    def __call__(self, layer: int, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor) -> Tensor:
        """Stores keys and values in the cache and returns the attention output [P, N, D]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_P, :, self.positions_P] = k_PKD
        values[self._rows_P, :, self.positions_P] = v_PKD
        if self._compiled is not None:
            return self._compiled.attend_at(q_PND, self._rows_P, self.positions_P, keys, values)
        outputs = []
        first = 0
        for start, stop, rows, mask in self._parts:
            last = first + rows.numel() * (stop - start)
            shape = (rows.numel(), stop - start)
            q, k, v = (x[first:last].view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q_PND, k_PKD, v_PKD))
            if mask is not None:
                k, v = keys[rows, :, :stop], values[rows, :, :stop]
            outputs.append(attend(q, k, v, mask).transpose(1, 2).flatten(0, 1))
            first = last
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeAttention:
    """Attention of one new token in each of the first B rows, over the first `length` slots.

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
        future_BT = torch.arange(length, device=positions_B.device) > positions_B[:, None]
        mask_BT = torch.zeros(future_BT.shape, dtype=cache.keys[0].dtype, device=positions_B.device)
        shape = (-1, cache.num_kv_heads, num_heads // cache.num_kv_heads, -1)
        mask_BKGT = mask_BT.masked_fill_(future_BT, -torch.inf)[:, None, None].expand(shape)
        self._on_cpu = positions_B.device.type == "cpu"
        self._mask = mask_BKGT.flatten(0, 1) if self._on_cpu else mask_BKGT

    def __call__(self, layer: int, q_BND: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """Stores keys and values in the cache and returns the attention output [B, N, D]."""
        batch, heads, dim = q_BND.shape
        kv_heads = k_BKD.size(1)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_B, :, self._positions_B] = k_BKD
        values[self._rows_B, :, self._positions_B] = v_BKD
        keys, values = keys[:batch, :, : self._length], values[:batch, :, : self._length]
        q_BKGD = q_BND.reshape(batch, kv_heads, -1, dim)
        if not self._on_cpu:
            return F.scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=self._mask).flatten(1, 2)
        # torch's CPU attention is slow for a single query; two batched matrix products over views are faster
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.baddbmm(self._mask, q_BKGD.flatten(0, 1), keys.transpose(1, 2), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(batch, heads, dim)
