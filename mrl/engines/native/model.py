"""The decoder's forward pass on one rank of a replica, for inference.

Owns the computation from token ids to logits with fused weights; how attention reads the cache is an argument. It
branches on the fields of `ArchSpec`, never on a family. Weights are the engine's stored tensors themselves, so that an
update in place is seen by the next forward.

Shapes: P packed tokens, N heads and K KV heads of this rank, D head dim, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.functional.rope import inverse_frequencies, scale_llama3
from mrl.models.base import ArchSpec

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_PND, k_PKD, v_PKD) -> [P, N, D]; stores the keys and values in the cache."""


class Decoder:
    """A pre-norm decoder with rotary positions, grouped queries and a gated MLP.

    Args:
        arch: The model.
        weights: This rank's stored tensors by the names of `weights/native.py`.
        tp_group: Ranks of the replica; None: this rank alone.
        max_positions: Rotary angles are prepared for positions below this.
    """

    def __init__(
        self, arch: ArchSpec, weights: Mapping[str, Tensor], *, tp_group: dist.ProcessGroup | None, max_positions: int
    ) -> None:
        self._arch = arch
        self._weights = weights
        self._tp_group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
        self._tp_size = 1 if self._tp_group is None else dist.get_world_size(self._tp_group)
        tp_rank = 0 if self._tp_group is None else dist.get_rank(self._tp_group)
        self.num_heads = arch.num_heads // self._tp_size
        self.num_kv_heads = max(1, arch.num_kv_heads // self._tp_size)
        embed = weights["embed"]
        self._first_token = tp_rank * embed.size(0)
        self._head = embed if arch.tie_word_embeddings else weights["lm_head"]
        inv_freq = inverse_frequencies(arch.head_dim, arch.rope_theta)
        if arch.rope_scaling is not None:
            inv_freq = scale_llama3(inv_freq, **asdict(arch.rope_scaling))
        angles = torch.outer(torch.arange(max_positions).float(), inv_freq).to(embed.device)
        self._cos = torch.cat([angles.cos(), angles.cos()], 1).to(embed.dtype)
        self._sin = torch.cat([-angles.sin(), angles.sin()], 1).to(embed.dtype)

    @torch.inference_mode()
    def forward(self, tokens_P: Tensor, positions_P: Tensor, attention: Attention) -> Tensor:
        """Collective over the replica: hidden states after the final norm [P, H].

        Args:
            tokens_P: Token ids, int64.
            positions_P: Position of each token in its sequence, int64.
            attention: What each layer's queries, keys and values go to.
        """
        weights, eps = self._weights, self._arch.rms_norm_eps
        cos, sin = self._cos[positions_P][:, None], self._sin[positions_P][:, None]
        x_PH = self._embed(tokens_P)
        for layer in range(self._arch.num_layers):
            name = f"layers.{layer}."
            normed = _rms_norm(x_PH, weights[name + "input_norm"], eps)
            q_PND, k_PKD, v_PKD = self._project(name, normed, cos, sin)
            mixed = attention(layer, q_PND, k_PKD, v_PKD).flatten(1)
            x_PH = x_PH + self._sum(F.linear(mixed, weights[name + "o"]))
            normed = _rms_norm(x_PH, weights[name + "post_norm"], eps)
            gate, up = F.linear(normed, weights[name + "gate_up"]).chunk(2, 1)
            x_PH = x_PH + self._sum(F.linear(F.silu(gate).mul_(up), weights[name + "down"]))
        return _rms_norm(x_PH, weights["final_norm"], eps)

    @torch.inference_mode()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Collective over the replica: logits of the true vocabulary [N, V], the same bits on every rank."""
        local = F.linear(hidden_NH, self._head)
        if self._tp_group is not None:
            parts = [torch.empty_like(local) for _ in range(self._tp_size)]
            dist.all_gather(parts, local, group=self._tp_group)
            local = torch.cat(parts, 1)
        return local[:, : self._arch.vocab_size]

    def _embed(self, tokens_P: Tensor) -> Tensor:
        table = self._weights["embed"]
        if self._tp_group is None:
            return F.embedding(tokens_P, table)
        rows = tokens_P - self._first_token
        elsewhere = (rows < 0) | (rows >= table.size(0))
        return self._sum(F.embedding(rows.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0))

    def _project(self, name: str, x_PH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed where the model does and rotated; values."""
        arch, weights = self._arch, self._weights
        qkv = F.linear(x_PH, weights[name + "qkv"], weights.get(name + "qkv_bias"))
        qkv = qkv.view(x_PH.size(0), -1, arch.head_dim)
        qk, v_PKD = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if arch.qk_norm:
            q = _rms_norm(qk[:, : self.num_heads], weights[name + "q_norm"], arch.rms_norm_eps)
            k = _rms_norm(qk[:, self.num_heads :], weights[name + "k_norm"], arch.rms_norm_eps)
            qk = torch.cat([q, k], 1)
        half = arch.head_dim // 2
        rotated = torch.cat([qk[..., half:], qk[..., :half]], -1).mul_(sin).addcmul_(qk, cos)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], v_PKD

    def _sum(self, partial: Tensor) -> Tensor:
        """Collective over the replica: the sum of the ranks' partial results, in place."""
        if self._tp_group is not None:
            dist.all_reduce(partial, group=self._tp_group)
        return partial


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), weight, eps)
