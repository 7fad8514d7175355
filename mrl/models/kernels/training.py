"""Differentiable tensor interface of the compiled functions of `training.c`.

They are the norm, the gated activation, RoPE and attention. `mrl/megatron/cpu/layers.py` selects the modules that use
them. Two functions for logits are not differentiable.

Shapes: P packed tokens, H columns, N heads and K KV heads, D head dim, I inner columns, R runs of queries, F families.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrl.models.base import Activation
from mrl.models.kernels.bindings import ACTIVATIONS, Library, required

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "norm_backward": [*[_P] * 6, *[_N] * 2, _F, _F],
    "gate_backward": [*[_P] * 3, *[_N] * 3],
    "rotate_rows": [_P, *[_N] * 2, *[_P] * 3, *[_N] * 4, _F],
    "attention": [*[_P] * 3, *[_N] * 4, *[_P] * 5, *[_N] * 7, _F, *[_P] * 3, _N],
    "attention_backward": [*[_P] * 3, *[_N] * 4, *[_P] * 5, *[_N] * 7, _F, *[_P] * 7, _N],
    "logit_sums": [*[_P] * 2, *[_N] * 2],
    "logit_gradients": [*[_P] * 4, *[_N] * 2],
}
_SIZES = {"norm_room": 2, "attention_room": 5}


Angles = tuple[Tensor, Tensor]
"""(cos, sin) of each row, both [P, half of the dimensions of a head that are rotated]."""


Scoring = tuple[float, int]
"""Factor of the scores, and the number of latest tokens that a query attends to, its own included (0: all)."""


@dataclass(frozen=True)
class SharedPrefixMask:
    """Attention mask of packed tokens whose sequences may share a prefix.

    Run r has the queries of the tokens `begin_R[r]` to `end_R[r] - 1`, and the keys of the tokens from `first_R[r]` on;
    each query attends to its own key and to all before it. Token t is row `row_P[t]` of keys and values, and row
    `row_P[t] - offset` of queries; each row of queries is in one run. All tensors are int64.

    Attributes:
        row_P: Row of keys and values of each token.
        first_R: First key token of each run.
        begin_R: First query token of each run.
        end_R: Token after the last query of each run.
        bound_F: First run of each family, and R at the end; two families have no key in common.
        offset: Number of rows by which the queries start after the keys.
        longest: Largest number of keys of a run.
    """

    row_P: Tensor
    first_R: Tensor
    begin_R: Tensor
    end_R: Tensor
    bound_F: Tensor
    offset: int
    longest: int


class TrainingKernels:
    """Differentiable compiled functions for CPU tensors of one dtype."""

    def __init__(self, library: Library) -> None:
        """Binds the functions of a compiled library."""
        self._library = library
        self._call: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            self._call[name] = getattr(library.functions, name)
            self._call[name].argtypes, self._call[name].restype = arguments, None
        for name, count in _SIZES.items():
            self._call[name] = getattr(library.functions, name)
            self._call[name].argtypes, self._call[name].restype = [_N] * count, _N

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Returns the RMSNorm over the last dimension times (offset + weight); differentiable."""
        normed: Tensor = _Norm.apply(x, weight_H, (eps, offset), self)  # type: ignore[no-untyped-call]
        return normed

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Returns activation(gate) x up [..., I] for gate_up [..., 2I]; differentiable."""
        gated: Tensor = _Gate.apply(gate_up, activation, self)  # type: ignore[no-untyped-call]
        return gated

    def apply_rope(self, x_PND: Tensor, angles: Angles) -> Tensor:
        """Applies RoPE: rotates heads by the angles of their row; differentiable.

        Args:
            x_PND: Heads; the last dimension is contiguous.
            angles: (cos, sin) in the dtype of x.
        """
        turned: Tensor = _Turn.apply(x_PND, angles, self)  # type: ignore[no-untyped-call]
        return turned

    def attention(
        self,
        q_PND: Tensor,
        k_PKD: Tensor,
        v_PKD: Tensor,
        families: SharedPrefixMask,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Returns softmax(q k^T scale) v [P, N, D] under the mask `families`; differentiable.

        Args:
            q_PND: Queries, contiguous.
            k_PKD: Keys, the last dimension contiguous; may have more rows than q.
            v_PKD: Values, laid out like the keys.
            families: Attention mask.
            scale: Factor of the scores.
            window: Number of latest tokens that a query attends to, its own included; None: all.
        """
        scoring = (scale, window or 0)
        attended: Tensor = _Attention.apply(q_PND, k_PKD, v_PKD, families, scoring, self)  # type: ignore[no-untyped-call]
        return attended

    # functions without autograd

    def norm_forward(self, x: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Returns the result of `norm` without autograd; x is contiguous."""
        return self._library.norm(x.view(-1, x.size(-1)), weight_H, eps, offset=offset).view(x.shape)

    def norm_gradients(
        self, x: Tensor, weight_H: Tensor, grad: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of `norm` with respect to x and the weight."""
        cols = x.size(-1)
        rows = x.numel() // cols
        grad_x, grad_weight = torch.empty_like(x), torch.empty(cols, dtype=torch.float32)
        room = torch.empty(self._call["norm_room"](rows, cols), dtype=torch.float32)
        self._call["norm_backward"](
            *(
                x.data_ptr(),
                weight_H.data_ptr(),
                grad.contiguous().data_ptr(),
                grad_x.data_ptr(),
                grad_weight.data_ptr(),
            ),
            *(room.data_ptr(), rows, cols, eps, offset),
        )
        return grad_x, grad_weight.to(weight_H.dtype)

    def gate_forward(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """Returns the result of `gate` without autograd; `gate_up` is contiguous."""
        return self._library.gate(gate_up.view(-1, gate_up.size(-1)), activation).view(*gate_up.shape[:-1], -1)

    def gate_gradient(self, gate_up: Tensor, grad: Tensor, activation: Activation = "silu") -> Tensor:
        """Returns the gradient of `gate` with respect to `gate_up`."""
        out = torch.empty_like(gate_up)
        inner = gate_up.size(-1) // 2
        self._call["gate_backward"](
            *(gate_up.data_ptr(), grad.contiguous().data_ptr(), out.data_ptr()),
            *(out.numel() // (2 * inner), inner, ACTIVATIONS.index(activation)),
        )
        return out

    def rope_forward(self, x_PND: Tensor, angles: Angles, sign: float) -> Tensor:
        """Returns the result of `apply_rope` without autograd; sign -1 rotates back."""
        if x_PND.stride(2) != 1:
            x_PND = x_PND.contiguous()
        out_PND = torch.empty(x_PND.shape, dtype=x_PND.dtype)
        self._call["rotate_rows"](
            *(x_PND.data_ptr(), x_PND.stride(0), x_PND.stride(1), angles[0].data_ptr(), angles[1].data_ptr()),
            *(out_PND.data_ptr(), *x_PND.shape, angles[0].size(1), sign),
        )
        return out_PND

    def attend(
        self, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor, families: SharedPrefixMask, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Returns the result of `attention` without autograd, and the log-sum-exp [P, N] that the gradient needs."""
        out_PND, lse_PN = torch.empty_like(q_PND), q_PND.new_empty(q_PND.shape[:2], dtype=torch.float32)
        inputs, rooms, threads = self._attention_arguments(q_PND, k_PKD, v_PKD, families, scoring, backward=False)
        self._call["attention"](*inputs, out_PND.data_ptr(), lse_PN.data_ptr(), rooms.data_ptr(), threads)
        return out_PND, lse_PN

    def attention_backward(
        self,
        q_PND: Tensor,
        k_PKD: Tensor,
        v_PKD: Tensor,
        families: SharedPrefixMask,
        scoring: Scoring,
        outcome: tuple[Tensor, Tensor],
        grad_PND: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of `attention` with respect to q, k and v; `outcome` is the result of `attend`."""
        out_PND, lse_PN = outcome
        grad_q = torch.empty_like(q_PND)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (k_PKD, v_PKD))
        inputs, rooms, threads = self._attention_arguments(q_PND, k_PKD, v_PKD, families, scoring, backward=True)
        self._call["attention_backward"](
            *inputs,
            *(out_PND.data_ptr(), lse_PN.data_ptr(), grad_PND.contiguous().data_ptr(), grad_q.data_ptr()),
            *(grad_k.data_ptr(), grad_v.data_ptr(), rooms.data_ptr(), threads),
        )
        return grad_q, grad_k.to(k_PKD.dtype), grad_v.to(v_PKD.dtype)

    # implementation of `Rows` in `algorithms/functional/logprobs.py`

    def sums(self, logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the softmax sums of each row, see `Rows`; the second value, removed entries, is always None."""
        logits_CV, sums = logits_CV.contiguous(), torch.empty(3, logits_CV.size(0))
        self._call["logit_sums"](logits_CV.data_ptr(), sums.data_ptr(), *logits_CV.shape)
        return sums, None

    def gradient(self, logits_CV: Tensor, normalizer_C: Tensor, slope_C: Tensor, bend_C: Tensor | None) -> Tensor:
        """Returns the gradient of the logits in place, see `Rows`."""
        out_CV = logits_CV.contiguous()
        bend = None if bend_C is None else bend_C.data_ptr()
        self._call["logit_gradients"](
            *(out_CV.data_ptr(), normalizer_C.data_ptr(), slope_C.data_ptr(), bend, *out_CV.shape)
        )
        return out_CV

    def _attention_arguments(
        self,
        q_PND: Tensor,
        k_PKD: Tensor,
        v_PKD: Tensor,
        families: SharedPrefixMask,
        scoring: Scoring,
        *,
        backward: bool,
    ) -> tuple[tuple[Any, ...], Tensor, int]:
        """Returns the leading C arguments of both attention functions, their buffer, and the number of threads."""
        _, heads, dim = q_PND.shape
        kv_heads, num_families = k_PKD.size(1), families.bound_F.numel() - 1
        threads = min(torch.get_num_threads(), num_families * kv_heads)
        room = self._call["attention_room"](families.longest, heads, kv_heads, dim, int(backward))
        inputs = (
            *(q_PND.data_ptr(), k_PKD.data_ptr(), v_PKD.data_ptr()),
            *(k_PKD.stride(0), k_PKD.stride(1), v_PKD.stride(0), v_PKD.stride(1)),
            *(families.row_P.data_ptr(), families.first_R.data_ptr(), families.begin_R.data_ptr()),
            *(families.end_R.data_ptr(), families.bound_F.data_ptr(), num_families, families.offset, families.longest),
            *(heads, kv_heads, dim, scoring[1], scoring[0]),
        )
        return inputs, torch.empty(room * threads, dtype=torch.float32), threads


@cache
def training_kernels(dtype: torch.dtype) -> TrainingKernels:
    """Returns the functions of the `required` library of a dtype."""
    return TrainingKernels(required(dtype))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, settings: tuple[float, float], training: TrainingKernels
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.kernels = settings, training
        return training.norm_forward(x, weight, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return *ctx.kernels.norm_gradients(x, weight, grads[0], *ctx.settings), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation, training: TrainingKernels) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.kernels = activation, training
        return training.gate_forward(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.gate_gradient(ctx.saved_tensors[0], grads[0], ctx.activation), None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Angles, training: TrainingKernels) -> Tensor:
        ctx.angles, ctx.kernels = angles, training
        return training.rope_forward(x, angles, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.rope_forward(grads[0], ctx.angles, -1.0), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        families: SharedPrefixMask,
        scoring: Scoring,
        training: TrainingKernels,
    ) -> Tensor:
        q = q.contiguous()
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        out, lse = training.attend(q, k, v, families, scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.families, ctx.scoring, ctx.kernels = families, scoring, training
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *outcome = ctx.saved_tensors
        found = ctx.kernels.attention_backward(q, k, v, ctx.families, ctx.scoring, outcome, grads[0])
        return *found, None, None, None
