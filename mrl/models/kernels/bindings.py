"""Tensor interface of the compiled functions of `kernels.c`, `products.c` and `drafts.c`; `training.py` has the others.

They are compiled per dtype (`build.py`) and run on PyTorch's own OpenMP threads: two thread pools would compete for the
cores.

All functions are batch-invariant: each row is computed by itself, in an order that depends only on the row's own size,
so its bits do not depend on the other rows. If the native engine and the actor both compute with these functions, their
log-probabilities are equal bit for bit (`rollout.true_on_policy`).

Shapes: P rows, H columns, I inputs, O outputs, N heads and K KV heads, D head dim, B rows and T slots of a KV cache,
V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mrl.errors import UserError
from mrl.models.base import Activation
from mrl.models.kernels import build, build_cache

HEADER, *SOURCES = (
    Path(__file__).with_name(name) for name in ("vectors.h", "kernels.c", "products.c", "drafts.c", "training.c")
)
Packed = tuple[Tensor, Tensor | None]
"""Weight packed by `Library.pack`, and its bias."""

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
"""Activations by the number that the functions take."""

DTYPES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBF16",)}

_P, _N, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "norm": [*[_P] * 4, *[_N] * 2, _F, _F],
    "rotate": [*[_P] * 6, *[_N] * 5, _F, _F],
    "gate": [*[_P] * 2, *[_N] * 3],
    "attend": [*[_P] * 3, _N, *[_P] * 7, *[_N] * 8, _F, _P],
    "attend_at": [_P, _N, *[_P] * 5, *[_N] * 8, _F, _P],
    "sample": [_P, _N, *[_P] * 4, *[_N] * 2, _F, _B],
    "score": [_P, _N, *[_P] * 2, *[_N] * 2, _F],
    "draft": [_P, _N, *[_P] * 5, *[_N] * 4, *[_P] * 3],
    "pack": [*[_P] * 2, *[_N] * 2],
    "product": [_P, _N, *[_P] * 4, *[_N] * 3],
    "mlp": [_P, _N, *[_P] * 6, *[_N] * 5],
}
_SIZES = {"packed_size": 2, "rows_size": 2, "mlp_rows": 3, "mlp_size": 3}
"""Functions that take so many integers and return one."""


class Library:
    """Compiled functions for CPU tensors of one dtype; tensors are contiguous unless documented otherwise.

    Attributes:
        key: Cache key of sources, compiler, flags, processor and instruction set; equal keys compute equal bits.
        functions: The loaded library.
    """

    def __init__(self, library: ctypes.CDLL, key: str) -> None:
        library.uses_amx.restype = _N
        self.key, self.functions = f"{key}-tiles" if library.uses_amx() else key, library
        self._call: dict[str, Callable[..., None]] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            self._call[name] = function
        self._size: dict[str, Callable[..., int]] = {}
        for name, count in _SIZES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [_N] * count, _N
            self._size[name] = function

    def norm(
        self, x_PH: Tensor, weight_H: Tensor, eps: float, delta_PH: Tensor | None = None, *, offset: float = 0.0
    ) -> Tensor:
        """Returns the RMSNorm of x + delta times (offset + weight); x is updated in place to the sum."""
        out_PH = torch.empty_like(x_PH)
        delta = None if delta_PH is None else delta_PH.data_ptr()
        self._call["norm"](x_PH.data_ptr(), delta, weight_H.data_ptr(), out_PH.data_ptr(), *x_PH.shape, eps, offset)
        return out_PH

    def rotate(
        self,
        qkv: Tensor,
        positions_P: Tensor,
        tables: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        num_heads: int,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies the QK norm, if any, and rotary embeddings in place; returns the views (q, k, v).

        Args:
            qkv: [P, N + 2K, D].
            positions_P: Position of each token, int64.
            tables: (cos, sin) from `rotary_tables`, both [positions, rotated dimensions].
            norms: Weights [D] of the query norm and the key norm; None: no QK norm.
            num_heads: N.
            eps: Epsilon of the norms.
            offset: Added to the norms' weights.
        """
        cos, sin = tables
        num, heads, dim = qkv.shape
        kv_heads = (heads - num_heads) // 2
        weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        self._call["rotate"](
            *(qkv.data_ptr(), positions_P.data_ptr(), cos.data_ptr(), sin.data_ptr(), *weights),
            *(num, num_heads, kv_heads, dim, cos.size(1), eps, offset),
        )
        return qkv[:, :num_heads], qkv[:, num_heads : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Returns activation(gate) x up [P, I] for gate_up [P, 2I]."""
        num, columns = gate_up.shape
        out_PI = gate_up.new_empty(num, columns // 2)
        self._call["gate"](gate_up.data_ptr(), out_PI.data_ptr(), num, columns // 2, ACTIVATIONS.index(activation))
        return out_PI

    def attend(
        self,
        q_PND: Tensor,
        k_PKD: Tensor,
        v_PKD: Tensor,
        positions_P: Tensor,
        keys_BTD: Tensor,
        values_BTD: Tensor,
        firsts_B: Tensor | None = None,
        alike: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Writes new tokens into the first rows of a KV cache and returns their causal attention [P, N, D].

        Args:
            q_PND: Queries; the stride between tokens is free, but equal for q, k and v.
            k_PKD: New keys.
            v_PKD: New values.
            positions_P: Positions of the new tokens, int64, consecutive within a row.
            keys_BTD: Key cache [rows, K, T, D], its slots contiguous; position p is in slot p, or with a window in slot
                p % T.
            values_BTD: Value cache, laid out like the keys; may be the keys themselves.
            firsts_B: Index of each row's first new token, and P at the end, int64; None: one token per row.
            alike: (row with the same first slots, number of these slots) of each row, both int64, see `attend` in
                `kernels.c`; None: unknown.
            window: Number of latest tokens that a token attends to, its own included; None: all.
            scale: Factor of the scores; None: D ** -0.5.
            sinks_N: Logit of each query head, fp32, that joins the softmax and has no value; None: none.
        """
        num, num_heads, dim = q_PND.shape
        homes, commons = (None, None) if alike is None else (alike[0].data_ptr(), alike[1].data_ptr())
        rows = num if firsts_B is None else firsts_B.numel() - 1
        firsts = None if firsts_B is None else firsts_B.data_ptr()
        out_PND = q_PND.new_empty(num, num_heads, dim)
        self._call["attend"](
            *(q_PND.data_ptr(), k_PKD.data_ptr(), v_PKD.data_ptr(), q_PND.stride(0)),
            *(positions_P.data_ptr(), firsts, homes, commons, keys_BTD.data_ptr(), values_BTD.data_ptr()),
            *(
                out_PND.data_ptr(),
                rows,
                num_heads,
                k_PKD.size(1),
                dim,
                keys_BTD.stride(0),
                keys_BTD.stride(1),
                *_window_and_ring(window, keys_BTD),
                dim**-0.5 if scale is None else scale,
                None if sinks_N is None else sinks_N.data_ptr(),
            ),
        )
        return out_PND

    def attend_at(
        self,
        q_PND: Tensor,
        rows_P: Tensor,
        positions_P: Tensor,
        keys_BKTD: Tensor,
        values_BKTD: Tensor,
        *,
        window: int | None = None,
        ring: bool = True,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Returns the causal attention [P, N, D] of tokens whose keys and values are in a KV cache already.

        Args:
            q_PND: Queries; the stride between tokens is free.
            rows_P: Cache row of each token, int64.
            positions_P: Position of each token, int64.
            keys_BKTD: Key cache, its slots contiguous.
            values_BKTD: Value cache, laid out like the keys; may be the keys themselves.
            window: Number of latest tokens that a token attends to, its own included; None: all.
            ring: With a window, position p is in slot p % T; False: in slot p, and "rows" may overlap.
            scale: Factor of the scores; None: D ** -0.5.
            sinks_N: See `attend`.
        """
        num, num_heads, dim = q_PND.shape
        out_PND = q_PND.new_empty(num, num_heads, dim)
        self._call["attend_at"](
            *(q_PND.data_ptr(), q_PND.stride(0), rows_P.data_ptr(), positions_P.data_ptr()),
            *(keys_BKTD.data_ptr(), values_BKTD.data_ptr(), out_PND.data_ptr(), num, num_heads, keys_BKTD.size(1)),
            *(dim, keys_BKTD.stride(0), keys_BKTD.stride(1)),
            *(_window_and_ring(window, keys_BKTD) if ring else (window or 0, 0)),
            dim**-0.5 if scale is None else scale,
            None if sinks_N is None else sinks_N.data_ptr(),
        )
        return out_PND

    def sample(
        self, logits_PV: Tensor, keys_P: Tensor, counts_P: Tensor, temperature: float, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """Samples one token per row from softmax(logits / temperature).

        Args:
            logits_PV: Logits; the stride between rows is free.
            keys_P: Random seed of each row, int64.
            counts_P: Number of response tokens that the row has so far, the counter of its random numbers.
            temperature: Divisor of the logits, above 0.
            greedy: True to take the most likely token instead.

        Returns:
            Tokens, int64 [P], and their log-probabilities, fp32 [P].
        """
        if logits_PV.stride(1) != 1:
            logits_PV = logits_PV.contiguous()
        keys_P, counts_P = keys_P.contiguous(), counts_P.contiguous()
        num, size = logits_PV.shape
        tokens_P = torch.empty(num, dtype=torch.int64)
        logprobs_P = torch.empty(num, dtype=torch.float32)
        self._call["sample"](
            *(logits_PV.data_ptr(), logits_PV.stride(0), keys_P.data_ptr(), counts_P.data_ptr()),
            *(tokens_P.data_ptr(), logprobs_P.data_ptr(), num, size, temperature, int(greedy)),
        )
        return tokens_P, logprobs_P

    def score(self, logits_PV: Tensor, tokens_P: Tensor, temperature: float) -> Tensor:
        """Returns the log-probability of each row's token, fp32 [P], with the same bits as `sample`."""
        if logits_PV.stride(1) != 1:
            logits_PV = logits_PV.contiguous()
        tokens_P = tokens_P.contiguous()
        logprobs_P = torch.empty(len(tokens_P), dtype=torch.float32)
        self._call["score"](
            *(logits_PV.data_ptr(), logits_PV.stride(0), tokens_P.data_ptr(), logprobs_P.data_ptr()),
            *(*logits_PV.shape, temperature),
        )
        return logprobs_P

    def draft(
        self,
        tokens_HW: Tensor,
        lengths_H: Tensor,
        begins_H: Tensor,
        next_H: Tensor,
        slots_B: Tensor,
        limits_B: Tensor,
        lookup: range,
        drafts_BK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Drafts the next tokens of each row by n-gram lookup; see `drafts.c` and `engines/native/ngram_history.py`.

        Returns:
            Number of tokens written to each row of `drafts_BK`, and length of the matched suffix (0: no match); int64
            [B].
        """
        counts_B, matched_B = torch.empty_like(slots_B), torch.empty_like(slots_B)
        self._call["draft"](
            *(tokens_HW.data_ptr(), tokens_HW.size(1), lengths_H.data_ptr(), begins_H.data_ptr(), next_H.data_ptr()),
            *(slots_B.data_ptr(), limits_B.data_ptr(), slots_B.numel(), lookup.start, lookup.stop - 1),
            *(drafts_BK.size(1), drafts_BK.data_ptr(), counts_B.data_ptr(), matched_B.data_ptr()),
        )
        return counts_B, matched_B

    def pack(self, weight_OI: Tensor, packed: Tensor | None = None) -> Tensor:
        """Returns the weight in the layout of `product`.

        Args:
            weight_OI: Weight.
            packed: Earlier result of the same shape, overwritten; None: a new tensor.
        """
        weight_OI = weight_OI.contiguous()
        if packed is None:
            packed = weight_OI.new_empty(self._size["packed_size"](*weight_OI.shape))
        self._call["pack"](weight_OI.data_ptr(), packed.data_ptr(), *weight_OI.shape)
        return packed

    def product(self, x_PI: Tensor, packed: Tensor, bias_O: Tensor | None, num_outputs: int) -> Tensor:
        """Returns x weight^T + bias [P, O]; each element is summed from the first input to the last and rounded once.

        Args:
            x_PI: Inputs; the stride between rows is free.
            packed: Weight from `pack`.
            bias_O: Bias in the dtype of x, or None.
            num_outputs: O.
        """
        if x_PI.stride(1) != 1:
            x_PI = x_PI.contiguous()
        num, inputs = x_PI.shape
        out_PO = x_PI.new_empty(num, num_outputs)
        scratch = torch.empty(self._size["rows_size"](num, inputs), dtype=torch.uint8)
        bias = None if bias_O is None else bias_O.data_ptr()
        self._call["product"](
            *(x_PI.data_ptr(), x_PI.stride(0), packed.data_ptr(), bias, out_PO.data_ptr(), scratch.data_ptr()),
            *(num, num_outputs, inputs),
        )
        return out_PO

    def mlp(self, x_PH: Tensor, gate_up: Packed, down: Packed, inner: int, activation: Activation = "silu") -> Tensor:
        """Returns the gated MLP [P, H], with the bits of `product`, `gate` and `product`.

        Processes a block of rows at a time, so that intermediate results stay in the L2 cache.

        Args:
            x_PH: Inputs; the stride between rows is free.
            gate_up: Packed weight [2I, H] and bias.
            down: Packed weight [H, I] and bias.
            inner: I.
            activation: See `gate`.
        """
        if x_PH.stride(1) != 1:
            x_PH = x_PH.contiguous()
        num, columns = x_PH.shape
        block = self._size["mlp_rows"](num, columns, inner)
        out_PH = x_PH.new_empty(num, columns)
        scratch = torch.empty(self._size["mlp_size"](block, columns, inner), dtype=torch.uint8)
        weights = [None if each is None else each.data_ptr() for each in (*gate_up, *down)]
        self._call["mlp"](
            *(x_PH.data_ptr(), x_PH.stride(0), *weights, out_PH.data_ptr(), scratch.data_ptr()),
            *(num, block, columns, inner, ACTIVATIONS.index(activation)),
        )
        return out_PH


def _window_and_ring(window: int | None, keys_BKTD: Tensor) -> tuple[int, int]:
    """Returns the C arguments `window` and `ring` of a KV cache."""
    return (0, 0) if window is None else (window, keys_BKTD.size(2))


@cache
def required(dtype: torch.dtype) -> Library:
    """Returns the library for `rollout.true_on_policy`, which has no fallback.

    Raises:
        UserError: The functions cannot be compiled on this machine.
    """
    found, problem = load_library(dtype)
    if found is None:
        raise UserError(
            f"rollout.true_on_policy=true needs compiled CPU functions, which this machine cannot build: {problem}. "
            f"Install a C compiler ({', '.join(build.COMPILERS)}), or set rollout.true_on_policy=false."
        )
    return found


def check_alike(dtype: torch.dtype) -> None:
    """Checks that all ranks of the job compiled the same `required` library.

    Raises:
        UserError: This rank's library differs from that of the first rank to ask, or cannot be compiled.
    """
    own = required(dtype).key
    if build_cache.first_rank_value(f"kernels/{dtype}", own) != own:
        raise UserError(
            "rollout.true_on_policy=true: this rank's compiled functions differ from those of another rank (another "
            "processor, compiler or version of mrl), so sums would be rounded differently. Use identical hosts, or "
            "set rollout.true_on_policy=false."
        )


@cache
def load_library(dtype: torch.dtype) -> tuple[Library | None, str | None]:
    """Returns (library, None), or (None, reason) if the functions cannot be compiled."""
    if dtype not in DTYPES:
        return None, f"there are none for {dtype}"
    found, key_or_reason = build.built(SOURCES, (HEADER,), DTYPES[dtype])
    return (None, key_or_reason) if found is None else (Library(found, key_or_reason), None)
