"""RMSNorm for Megatron's local layer spec, whose own norm without TransformerEngine rejects sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension.

    Under sequence parallelism each rank sees only its part of the sequence; the attribute `sequence_parallel` of the
    weight makes Megatron sum the gradients over ranks (`finalize_model_grads`).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised rows, in the dtype of `x`."""
        normed: Tensor = _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RmsNorm(torch.autograd.Function):
    """RMSNorm x r w with r = (mean x^2 + eps)^-1/2, in fp32 or fp64. Saves only x and r of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (at_least_fp32(x) * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return *gradients(x, weight, scale, grads[0]), None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Returns (mean x^2 + eps)^-1/2 of each row [..., 1], in fp32, or in fp64 if the rows are."""
    norm = torch.linalg.vector_norm(at_least_fp32(x), dim=-1, keepdim=True)
    scale: Tensor = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
    return scale


def gradients(x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and the weight, from the output's gradient and the rows' `inverse_rms`."""
    wide = at_least_fp32(grad)
    unit = at_least_fp32(x) * scale
    product = wide * unit
    grad_weight = product.flatten(0, -2).sum(0)
    # d x = r (w g - u mean(w g u)) with u = x r
    along = (product @ at_least_fp32(weight)).div_(x.size(-1)).unsqueeze(-1)
    grad_x = torch.addcmul(wide.mul(weight), unit, along, value=-1).mul_(scale)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)
