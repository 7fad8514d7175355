"""Compiled CPU versions of `torch_ops.Operations` (from `mrl/models/kernels`): one pass over memory each.

With `rollout.true_on_policy` the engine uses `BatchInvariantOperations`, which the actor uses too
(`megatron/on_policy_layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.engines.native.attention import PrefillAttention, PrefillChunk
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.ngram_history import History
from mrl.engines.native.packed_linear import Linear
from mrl.engines.native.torch_ops import Attention, HeadNorms, Heads, Operations, Rotation
from mrl.errors import UserError
from mrl.models.kernels import bindings, build, build_cache
from mrl.models.kernels.bindings import Library

PLAIN = "plain"


class Compiled(Operations):
    """Compiled operations for activations of one dtype; arguments are contiguous unless stated otherwise."""

    are_compiled = True

    def __init__(self, compiled: Library) -> None:
        self._library = compiled

    def norm(self, x_PH: Tensor, weight_H: Tensor, eps: float, delta_PH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Adds the delta in place, see `Operations`."""
        return x_PH, self._library.norm(x_PH, weight_H, eps, delta_PH)

    def rotation(self, heads: Heads, positions_P: Tensor) -> Rotation:
        """Returns a function that rotates queries and keys in place, see `Operations`."""
        positions_P = positions_P.contiguous()

        def rotate(qkv: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
            return self._library.rotate(qkv, positions_P, (heads.cos, heads.sin), norms, heads.num_heads, heads.eps)

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) x up, see `Operations`."""
        return self._library.gate(gate_up)

    def mlp(self, x_PH: Tensor, gate_up: Linear, down: Linear) -> Tensor:
        """Computes the MLP in one call if both products are compiled, see `Operations`."""
        if gate_up.row_by_row is None or down.row_by_row is None:
            return super().mlp(x_PH, gate_up, down)
        return self._library.mlp(x_PH, gate_up.row_by_row, down.row_by_row, down.num_inputs)

    def decode_attention(self, cache: KVCache, positions_B: Tensor, length: int, num_heads: int) -> Attention:
        """Returns attention that reads only each row's own slots, see `Operations`."""
        del length
        return self.verify_attention(cache, positions_B, None, num_heads)

    def verify_attention(
        self, cache: KVCache, positions_P: Tensor, firsts_B: Tensor | None, num_heads: int
    ) -> Attention:
        """Returns attention of several new tokens in each of the first B rows, each bitwise equal to decoding it alone.

        Args:
            cache: KV cache with the keys and values before the new tokens.
            positions_P: Position of each token, consecutive within a row.
            firsts_B: Index of each row's first token, and P at the end, int64; None: one token per row.
            num_heads: N.
        """
        del num_heads
        positions_P = positions_P.contiguous()

        def attend(layer: int, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor, sinks_N: Tensor | None = None) -> Tensor:
            return self._library.attend(
                *(q_PND, k_PKD, v_PKD, positions_P, cache.keys[layer], cache.values[layer]),
                *(firsts_B, cache.shared_prefixes, cache.windows[layer], sinks_N),
            )

        return attend

    def sample(
        self, logits_NV: Tensor, keys_N: Tensor, counts_N: Tensor, temperature: float, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """Samples without changing the logits, see `Operations`."""
        return self._library.sample(logits_NV, keys_N, counts_N, temperature, greedy=greedy)

    def draft(
        self, history: History, slots_B: Tensor, limits_B: Tensor, lookup: range, drafts_BK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafts tokens for each row from the n-gram history.

        Args:
            history: Token history of the call.
            slots_B: Sequence of each row in the history, int64.
            limits_B: Most tokens to draft, int64.
            lookup: Lengths of the n-gram to search; the longest match wins.
            drafts_BK: Output: drafted tokens, int64.

        Returns:
            Number of drafted tokens and length of the matched n-gram (0: none) per row, int64.
        """
        said = (history.tokens_HW, history.lengths_H, history.begins_H, history.next_H)
        return self._library.draft(*said, slots_B, limits_B, lookup, drafts_BK)


class BatchInvariantOperations(Compiled):
    """Compiled operations that the actor shares bit for bit, also for prefill and truncated sampling.

    Args:
        compiled: Kernels for the dtype of activations.
        wide: Kernels for fp32.
    """

    def __init__(self, compiled: Library, wide: Library) -> None:
        super().__init__(compiled)
        self._wide = wide

    def prefill_attention(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> PrefillAttention:
        """Returns attention that computes each token as if it were decoded, see `Operations`."""
        return PrefillAttention(cache, chunks, self._library)

    def sample_kept(self, kept_NV: Tensor, keys_N: Tensor, counts_N: Tensor, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Samples from truncated logits, see `Operations`."""
        return self._wide.sample(kept_NV, keys_N, counts_N, 1.0, greedy=greedy)


def operations(
    dtype: torch.dtype, device: torch.device, *, eager: bool, exact: bool = False
) -> tuple[Operations, str | None]:
    """Returns the fastest operations that every rank of the job supports, and the reason if they are not compiled.

    All engines of a job use the same ones: kernels differ in the last bits, and a token must not depend on the rank.

    Args:
        dtype: Dtype of activations.
        device: Device of activations.
        eager: Use PyTorch operators (`rollout.enforce_eager`).
        exact: Use the operations that the actor shares (`rollout.true_on_policy`).

    Raises:
        UserError: Another rank compiles but this one cannot, or `exact` is set and this rank cannot compile.
    """
    if exact:
        bindings.check_alike(dtype)
        return BatchInvariantOperations(bindings.required(dtype), bindings.required(torch.float32)), None
    if device.type != "cpu" or eager:
        return Operations(), None
    found, problem = bindings.load_library(dtype)
    if build_cache.first_rank_value(f"operations/{dtype}", PLAIN if found is None else "compiled") == PLAIN:
        return Operations(), problem or "another rank of this job cannot compile"
    if found is None:
        raise UserError(
            f"another rank compiles kernels of the native engine, but this one cannot: {problem}. Tokens would depend "
            f"on the rank: install a C compiler ({', '.join(build.COMPILERS)}) here, or set rollout.enforce_eager=true."
        )
    return Compiled(found), None
