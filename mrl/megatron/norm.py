"""RMSNorm for Megatron's local layer spec, whose own norm without TransformerEngine rejects sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, times the weight, or 1 + weight with zero-centered weights.

    Under sequence parallelism each rank sees only its part of the sequence; the attribute `sequence_parallel` of the
    weight makes Megatron sum the gradients over ranks (`finalize_model_grads`).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised rows, in the dtype of `x`."""
        normed: Tensor = _RmsNorm.apply(x, self.weight, self.eps, self.offset)  # type: ignore[no-untyped-call]
        return normed


class _RmsNorm(torch.autograd.Function):
    """RMSNorm x r w with r = (mean x^2 + eps)^-1/2 and w = weight + offset, in fp32 or fp64.

    Saves only x and r of each row for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return (at_least_fp32(x) * scale).mul_(_factor(weight, offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = gradients(x, _factor(weight, ctx.offset), scale, grads[0])
        return grad_x, grad_weight.to(weight.dtype), None, None


def _factor(weight: Tensor, offset: float) -> Tensor:
    return at_least_fp32(weight) + offset if offset else weight


class PostNorm(torch.nn.Module):
    """Norm of a sublayer's output before it is added to the residual; Megatron builds it as its bias-dropout-add.

    The sublayer has no bias, and there is no dropout.

    Args:
        config: Megatron's config.
        norm: Class of the norm.
    """

    def __init__(self, config: Any, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Returns the function ((output, bias), residual, dropout probability) -> residual + norm(output)."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        output = output_with_bias[0]
        # Megatron enables gradients around this call, also where the layer computes without them
        with torch.set_grad_enabled(output.requires_grad):
            normed = self.norm(output)
        added: Tensor = residual + normed
        return added


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
