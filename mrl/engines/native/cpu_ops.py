"""The operations between matrix products, from `mrl/models/kernels`: one pass over memory each.

Owns which operations an engine takes. With `rollout.true_on_policy` they are `RowByRow`, by which the actor computes
too (`megatron/on_policy_layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.engines.native.attention import Chunk, PrefillAttention
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.ngram_history import History
from mrl.engines.native.packed_linear import Linear
from mrl.engines.native.torch_ops import Attention, HeadNorms, Heads, Operations, Rotation
from mrl.errors import UserError
from mrl.models.kernels import build, library, machine
from mrl.models.kernels.library import Library

PLAIN = "plain"


class Compiled(Operations):
    """For activations of one dtype on a CPU; what it is given is contiguous where that is not said otherwise."""

    are_compiled = True

    def __init__(self, compiled: Library) -> None:
        self._library = compiled

    def norm(self, x_PH: Tensor, weight_H: Tensor, eps: float, delta_PH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Operations`; the delta is added in place."""
        return x_PH, self._library.norm(x_PH, weight_H, eps, delta_PH)

    def rotation(self, heads: Heads, positions_P: Tensor) -> Rotation:
        """See `Operations`; queries and keys are turned in place."""
        positions_P = positions_P.contiguous()

        def rotate(qkv: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
            return self._library.rotate(qkv, positions_P, (heads.cos, heads.sin), norms, heads.num_heads, heads.eps)

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        return self._library.gate(gate_up)

    def mlp(self, x_PH: Tensor, gate_up: Linear, down: Linear) -> Tensor:
        """See `Operations`; of many rows in one call, where both products are compiled ones."""
        if gate_up.row_by_row is None or down.row_by_row is None:
            return super().mlp(x_PH, gate_up, down)
        return self._library.mlp(x_PH, gate_up.row_by_row, down.row_by_row, down.num_inputs)

    def decode_attention(self, cache: KVCache, positions_B: Tensor, length: int, num_heads: int) -> Attention:
        """See `Operations`; each row's own slots are read."""
        del length
        return self.verify_attention(cache, positions_B, None, num_heads)

    def verify_attention(
        self, cache: KVCache, positions_P: Tensor, firsts_B: Tensor | None, num_heads: int
    ) -> Attention:
        """Of several new tokens in each of the first B rows: each with the bits that it would have alone.

        Args:
            cache: Holds everything before the new tokens.
            positions_P: Position of each, one after the other in a row.
            firsts_B: Index of each row's first token, and P at the end, int64; None: one token a row.
            num_heads: N.
        """
        del num_heads
        positions_P = positions_P.contiguous()

        def attend(layer: int, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            return self._library.attend(q_PND, k_PKD, v_PKD, positions_P, keys, values, firsts_B, cache.alike)

        return attend

    def sample(
        self, logits_NV: Tensor, keys_N: Tensor, counts_N: Tensor, temperature: float, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`; logits stay as they are."""
        return self._library.sample(logits_NV, keys_N, counts_N, temperature, greedy=greedy)

    def draft(
        self, history: History, slots_B: Tensor, limits_B: Tensor, lookup: range, drafts_BK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What each row's sequence may say next.

        Args:
            history: What was said.
            slots_B: The sequence of each row, int64.
            limits_B: Tokens to draft at most, int64.
            lookup: Lengths of its end that are looked for; the longest that is found counts.
            drafts_BK: Receives the drafted tokens, int64.

        Returns:
            Of each row how many were drafted, and the length that was found, 0: none; int64.
        """
        said = (history.tokens_HW, history.lengths_H, history.begins_H, history.next_H)
        return self._library.draft(*said, slots_B, limits_B, lookup, drafts_BK)


class RowByRow(Compiled):
    """Compiled ones by which the actor computes the same bits: also where prompts are read, and where tokens drop.

    Args:
        compiled: For the dtype of activations.
        wide: For fp32.
    """

    def __init__(self, compiled: Library, wide: Library) -> None:
        super().__init__(compiled)
        self._wide = wide

    def prefill_attention(self, cache: KVCache, chunks: Sequence[Chunk]) -> PrefillAttention:
        """See `Operations`; each token is computed as if it was decoded."""
        return PrefillAttention(cache, chunks, self._library)

    def sample_kept(self, kept_NV: Tensor, keys_N: Tensor, counts_N: Tensor, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        return self._wide.sample(kept_NV, keys_N, counts_N, 1.0, greedy=greedy)


def operations(
    dtype: torch.dtype, device: torch.device, *, eager: bool, exact: bool = False
) -> tuple[Operations, str | None]:
    """The fastest operations that this job has, and why they are not compiled ones where that is no choice.

    All engines of a job have the same: forms differ in the last bits, and tokens do not depend on where they are drawn.

    Args:
        dtype: Of activations.
        device: Where they are.
        eager: PyTorch's operators are wanted.
        exact: Those by which the actor computes too.

    Raises:
        UserError: Another rank has compiled ones and here they cannot be, or only they will do.
    """
    if exact:
        library.check_alike(dtype)
        return RowByRow(library.required(dtype), library.required(torch.float32)), None
    if device.type != "cpu" or eager:
        return Operations(), None
    found, problem = library.library(dtype)
    if machine.agreed(f"operations/{dtype}", PLAIN if found is None else "compiled") == PLAIN:
        return Operations(), problem or "another rank of this job cannot compile"
    if found is None:
        raise UserError(
            f"another rank compiles what the native engine does between products; this one cannot: {problem}. Tokens "
            f"would depend on the rank: install a C compiler ({', '.join(build.COMPILERS)}) there, or set "
            "rollout.enforce_eager=true."
        )
    return Compiled(found), None
