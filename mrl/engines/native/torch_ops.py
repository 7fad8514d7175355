"""Operations between the matrix products of a forward, with PyTorch's operators; `cpu_ops` has compiled versions.

Each operation computes every row alone.

Shapes: P packed tokens, B decoding rows, H hidden, N heads and K KV heads of this rank, D head dim, I inner columns, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.algorithms.functional.sampling import draw, uniforms
from mrl.engines.native.attention import DecodeAttention, PrefillAttention, PrefillChunk
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.packed_linear import Linear

Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Computes attention [P, N, D] from (layer, q_PND, k_PKD, v_PKD, sinks or None), and stores keys and values in the
cache."""

HeadNorms = tuple[Tensor, Tensor]
"""Weights [D] of the norms of queries and of keys."""

Rotation = Callable[[Tensor, HeadNorms | None], tuple[Tensor, Tensor, Tensor]]
"""Computes rotated queries and keys (normalized first if the model does), and values, from (qkv [P, N + 2K, D],
norms)."""


@dataclass(frozen=True)
class Heads:
    """Attention heads of this rank, and rotary tables.

    Attributes:
        num_heads: N.
        num_kv_heads: K.
        eps: Epsilon of the norms of queries and keys.
        cos: Rotary table [positions, rotated dimensions of a head], in the dtype of activations.
        sin: Rotary table like `cos`; the first half is negated.
    """

    num_heads: int
    num_kv_heads: int
    eps: float
    cos: Tensor
    sin: Tensor


class Operations:
    """Operations in PyTorch.

    Attributes:
        are_compiled: Whether the job compiles them, and so may compile products.
    """

    are_compiled: ClassVar[bool] = False

    def norm(self, x_PH: Tensor, weight_H: Tensor, eps: float, delta_PH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns x + delta (may be x itself; x without a delta) and its root-mean-square norm."""
        if delta_PH is not None:
            x_PH = x_PH + delta_PH
        return x_PH, F.rms_norm(x_PH, (x_PH.size(-1),), weight_H, eps)

    def rotation(self, heads: Heads, positions_P: Tensor) -> Rotation:
        """Returns a function that rotates queries and keys of one forward, the same for all layers."""
        cos, sin = heads.cos[positions_P][:, None], heads.sin[positions_P][:, None]
        count = heads.num_heads
        size = heads.cos.size(1)
        half = size // 2

        def rotate(qkv: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
            qk, v_PKD = qkv[:, : -heads.num_kv_heads], qkv[:, -heads.num_kv_heads :]
            if norms is not None:
                parts = zip((qk[:, :count], qk[:, count:]), norms, strict=True)
                qk = torch.cat([F.rms_norm(part, weight.shape, weight, heads.eps) for part, weight in parts], 1)
            turned, kept = qk[..., :size], qk[..., size:]
            rotated = torch.cat([turned[..., half:], turned[..., :half]], -1).mul_(sin).addcmul_(turned, cos)
            if kept.size(-1):
                rotated = torch.cat([rotated, kept], -1)
            return rotated[:, :count], rotated[:, count:], v_PKD

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) x up [P, I] of [gate; up] columns [P, 2I]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def mlp(self, x_PH: Tensor, gate_up: Linear, down: Linear) -> Tensor:
        """Returns the output [P, H] of a dense layer's gated MLP."""
        return down(self.gate(gate_up(x_PH)))

    def prefill_attention(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> PrefillAttention:
        """Returns the attention of prompt chunks, sorted by `extent`."""
        return PrefillAttention(cache, chunks)

    def decode_attention(self, cache: KVCache, positions_B: Tensor, length: int, num_heads: int) -> Attention:
        """Returns the attention of one new token in each of the first B rows; the longest has `length` slots."""
        return DecodeAttention(cache, positions_B, length, num_heads)

    def sample(
        self, logits_NV: Tensor, keys_N: Tensor, counts_N: Tensor, temperature: float, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """Samples from softmax(logits / temperature); returns each row's token, int64, and its log-probability, fp32.

        Args:
            logits_NV: Logits of any dtype; fp32 logits are overwritten.
            keys_N: Random stream of each row.
            counts_N: Response tokens of each row so far.
            temperature: Divisor of the logits, above 0.
            greedy: Take the most likely token.
        """
        logits = logits_NV.float()
        if temperature != 1.0:
            logits = logits.div_(temperature)
        return self.sample_kept(logits, keys_N, counts_N, greedy=greedy)

    def sample_kept(self, kept_NV: Tensor, keys_N: Tensor, counts_N: Tensor, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Does the same as `sample` with fp32 logits already divided by the temperature; dropped tokens are -inf."""
        probs_NV = kept_NV.softmax(1)
        tokens_N = probs_NV.argmax(1) if greedy else draw(probs_NV, uniforms(keys_N, counts_N))
        return tokens_N, probs_NV.gather(1, tokens_N[:, None]).squeeze(1).log()
