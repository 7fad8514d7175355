"""Gated delta net (arXiv 2412.06464) in PyTorch: the parts between its input and its output projection.

The actor and the native engine share these functions. The formulas and their precision are those of transformers.

A state S [K, V] of each value head maps keys to values. A token with key k, value v, decay exp(g) and rate beta first
decays it, S <- exp(g) S, and then moves the value that S gives for k towards v: S <- S + beta k (v - S^T k)^T. The
output is S^T q.

Shapes: B sequences, T tokens, G key heads, R value heads of a key head, H = G R value heads, K key dims, V value dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.models.base import LinearAttentionSpec

CHUNK = 64
"""Tokens that are computed at once: their mutual effects cost its square, each chunk a step of the recurrence."""
UNIT_EPS = 1e-6
"""Added to the squared norms of queries and keys."""


class Projected(NamedTuple):
    """Rows of the input projection.

    Attributes:
        mixed: Queries, keys and values before the convolution, key head by key head, [..., G (2 K + R V)].
        gate: Gate of the output, [..., H, V].
        rate: Logit of beta, [..., H].
        step: Time step before its bias, [..., H].
    """

    mixed: Tensor
    gate: Tensor
    rate: Tensor
    step: Tensor


class Scan(NamedTuple):
    """Inputs of the delta rule in fp32 or wider.

    Attributes:
        query: Scaled unit vectors [..., H, K].
        key: Unit vectors [..., H, K].
        value: [..., H, V].
        decay: Logarithm of the factor of the state, at most 0, [..., H].
        beta: Between 0 and 1, [..., H].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def split_projection(projected: Tensor, linear: LinearAttentionSpec) -> Projected:
    """Splits rows of the input projection [..., G (2 K + 2 R V + 2 R)], whose columns go key head by key head."""
    shared = linear.num_value_heads // linear.num_key_heads
    mixed, values = 2 * linear.key_head_dim + shared * linear.value_head_dim, shared * linear.value_head_dim
    by_head = _cut(projected, mixed + values + 2 * shared)
    qkv, gate, rate, step = torch.split(by_head, [mixed, values, shared, shared], -1)
    values_by_head = _cut(gate, linear.value_head_dim).flatten(-3, -2)
    return Projected(qkv.flatten(-2), values_by_head, rate.flatten(-2), step.flatten(-2))


def convolve(taps: Tensor, weight: Tensor) -> Tensor:
    """Returns silu of the causal convolution [..., C].

    Args:
        taps: Inputs that the convolution reads for each token, oldest first, [..., W, C].
        weight: [C, 1, W].
    """
    return F.silu((taps * weight[:, 0].T).sum(-2))


def scan_inputs(
    convolved: Tensor, projected: Projected, decay_log: Tensor, step_bias: Tensor, linear: LinearAttentionSpec
) -> Scan:
    """Returns the inputs of the delta rule.

    Args:
        convolved: Output of the convolution [..., G (2 K + R V)].
        projected: Rows of the input projection.
        decay_log: Logarithm of each head's decay rate, [H].
        step_bias: Bias of the time steps, [H].
        linear: Sizes of the heads.
    """
    wide = torch.promote_types(convolved.dtype, torch.float32)
    dim, shared = linear.key_head_dim, linear.num_value_heads // linear.num_key_heads
    by_head = _cut(convolved, 2 * dim + shared * linear.value_head_dim).to(wide)
    query, key = (_unit(by_head[..., start : start + dim]).repeat_interleave(shared, -2) for start in (0, dim))
    value = _cut(by_head[..., 2 * dim :], linear.value_head_dim).flatten(-3, -2)
    decay = -decay_log.to(wide).exp() * F.softplus(projected.step.to(wide) + step_bias.to(wide))
    return Scan(query * dim**-0.5, key, value, decay, projected.rate.sigmoid().to(wide))


def _cut(x: Tensor, size: int) -> Tensor:
    """Cuts the last dimension into parts of `size`, a dimension of their own."""
    return x.reshape(*x.shape[:-1], -1, size)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
    return unit


def delta_rule(scan: Scan, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B, T, H, V] of sequences and their last states [B, H, K, V], in chunks of tokens.

    Inside a chunk, the values that tokens write depend on one another: a triangular system gives them all at once.

    Args:
        scan: Inputs [B, T, ...]; a token of zeros leaves the state as it is.
        state: State before the first token, [B, H, K, V]; None: zero.
    """
    length = scan.value.size(1)
    size = min(CHUNK, length)
    query, key, value, decay, beta = (
        _in_chunks(F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % size)), size) for x in scan
    )
    before = torch.ones(size, size, dtype=torch.bool, device=value.device).tril()
    total = decay.cumsum(-1)
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(~before, -torch.inf).exp()
    writes = key * beta[..., None]
    system = (writes @ key.transpose(-1, -2)) * pairs
    wanted = torch.cat([value * beta[..., None], writes * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, from_state = solved.split([value.size(-1), key.size(-1)], -1)
    scores = (query @ key.transpose(-1, -2)) * pairs
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    if state is None:
        state = value.new_zeros(value.size(0), value.size(1), key.size(-1), value.size(-1))
    outputs = []
    for index in range(value.size(2)):
        written = values[:, :, index] - from_state[:, :, index] @ state
        outputs.append(query[:, :, index] @ state + scores[:, :, index] @ written)
        state = state * kept[:, :, index] + key[:, :, index].transpose(-1, -2) @ written
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Cuts tokens [B, T, H, ...] into chunks, [B, H, T / size, size, ...]."""
    return x.reshape(x.size(0), -1, size, *x.shape[2:]).movedim(3, 1)


def delta_step(scan: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B, H, V] of one token of each sequence and the states after it.

    Args:
        scan: Inputs [B, ...].
        state: States before the token, [B, H, K, V].
    """
    decayed = state * scan.decay.exp()[..., None, None]
    written = (scan.value - (decayed * scan.key[..., None]).sum(-2)) * scan.beta[..., None]
    state = decayed + scan.key[..., None] * written[..., None, :]
    return (state * scan.query[..., None]).sum(-2), state


def gated_norm(output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the root-mean-square norm of each head's output times the weight and silu of the gate, [..., H V].

    Args:
        output: Output of the delta rule [..., H, V], fp32 or wider.
        gate: [..., H, V] in the model's dtype.
        weight: [V].
        eps: Epsilon of the norm.
    """
    rounded = output.to(gate.dtype).to(output.dtype)
    normed = rounded * (rounded.square().mean(-1, keepdim=True) + eps).rsqrt()
    gated = (weight * normed.to(gate.dtype)) * F.silu(gate.to(output.dtype))
    return gated.to(gate.dtype).flatten(-2)
