"""Divergences between student and teacher over the full vocabulary, with the vocabulary sharded over ranks.

A fused output layer: forward and backward compute the logits of both models for a chunk of rows at a time, so no tensor
of all rows and all tokens ever exists. Ranks exchange five to seven numbers per row. The teacher gets no gradient.
Reductions over the hidden states' own parallelism are left to the caller.

Shapes: P packed positions, R scored rows, C rows of a chunk, H hidden (the teacher's may differ), V this rank's part of
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.logprobs import VocabShard, chunks, gather_shards

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """Kind of divergence between distributions softmax(logits / temperature).

    Attributes:
        kind: Divergence of student p and teacher q, summed over the full vocabulary:

            - reverse_kl: KL(p || q) = sum p (log p - log q);
            - forward_kl: KL(q || p) = sum q (log q - log p);
            - jsd: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p.
        beta: Coefficient of jsd, in (0, 1). The limits of jsd / beta at 0 and jsd / (1 - beta) at 1 are forward_kl and
            reverse_kl.
        temperature: Divisor of the logits of both models, above 0.
        chunk_rows: Number of rows of logits in memory at a time.
    """

    kind: DivergenceKind
    beta: float = 0.5
    temperature: float = 1.0
    chunk_rows: int = 1024


class OutputLayer(NamedTuple):
    """Hidden states, and the output weight that maps them to logits.

    Attributes:
        hidden_RH: Hidden state of each scored row.
        weight_VH: Output weight of this rank; its rows are the same tokens as the student's.
    """

    hidden_RH: Tensor
    weight_VH: Tensor


def linear_divergence(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows_R: Tensor,
    teacher: OutputLayer,
    *,
    shard: VocabShard,
    divergence: Divergence,
) -> Tensor:
    """Collective over `shard.group`: returns the divergence of student and teacher at each row, nats.

    A teacher with exactly the student's weights gives exactly 0, and a gradient of exactly 0.

    Args:
        hidden_PH: Final hidden states of the student, the same on all ranks of the group. Its gradient is this rank's
            part of the sum over the group.
        weight_VH: Output weight of the student on this rank, padding rows included.
        rows_R: Positions at which the distributions are compared.
        teacher: Hidden states at these positions and output weight of the teacher; they get no gradient.
        shard: Vocabulary range of the rows of both weights.
        divergence: Kind, temperature and chunk size.

    Returns:
        divergence_R, differentiable. Logits are in the dtype of each weight, everything after them is fp32, or fp64 for
        fp64 weights.

    Raises:
        ValueError: The kind is unknown, a number is out of range, or shapes do not match.

    Source: R. Agarwal et al., arXiv 2306.13649, eq. 1 (generalised JSD); TRL's `generalized_jsd_loss` has the same
    beta. With x the student's logits, d reverse_kl / d x_v = p_v (log p_v - log q_v - KL), d forward_kl / d x_v = p_v -
    q_v, d jsd / d x_v = (1 - beta) p_v (log p_v - log m_v - KL(p || m)).
    """
    _check(divergence, rows_R, teacher, shard)
    found: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, rows_R, teacher.hidden_RH, teacher.weight_VH, shard, divergence
    )
    return found


def _check(divergence: Divergence, rows_R: Tensor, teacher: OutputLayer, shard: VocabShard) -> None:
    if divergence.kind not in get_args(DivergenceKind):
        raise ValueError(f"divergence '{divergence.kind}' is unknown, expected {', '.join(get_args(DivergenceKind))}.")
    if divergence.temperature <= 0 or divergence.chunk_rows < 1:
        raise ValueError(f"temperature={divergence.temperature}, chunk_rows={divergence.chunk_rows}: must be positive.")
    if divergence.kind == "jsd" and not 0 < divergence.beta < 1:
        raise ValueError(
            f"beta={divergence.beta}: expected a number in (0, 1); use forward_kl or reverse_kl at its ends"
        )
    if teacher.hidden_RH.size(0) != rows_R.numel() or teacher.weight_VH.size(0) < shard.size:
        raise ValueError(
            f"the teacher has {teacher.hidden_RH.size(0)} rows and {teacher.weight_VH.size(0)} tokens here, the "
            f"student {rows_R.numel()} rows and {shard.size} tokens."
        )


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        rows_R: Tensor,
        teacher_RH: Tensor,
        teacher_VH: Tensor,
        shard: VocabShard,
        divergence: Divergence,
    ) -> Tensor:
        weight, teacher = weight_VH[: shard.size], OutputLayer(teacher_RH, teacher_VH[: shard.size])
        dtype = torch.promote_types(torch.float32, weight_VH.dtype)
        # per row: log sum e^x of both models, and this rank's part of the divergence's two sums
        normalizers_2R, sums_2R = torch.zeros((2, 2, rows_R.numel()), dtype=dtype, device=hidden_PH.device)
        for part in chunks(rows_R.numel(), divergence.chunk_rows):
            student = scaled_logits(hidden_PH.index_select(0, rows_R[part]), weight, divergence.temperature)
            teacher_logits = scaled_logits(teacher.hidden_RH[part], teacher.weight_VH, divergence.temperature)
            normalizers_2R[:, part] = log_normalizers((student, teacher_logits), shard)
            log_p, log_q = (
                x.sub_(n[:, None]) for x, n in zip((student, teacher_logits), normalizers_2R[:, part], strict=True)
            )
            sums_2R[:, part] = _sums(log_p, log_q, divergence)
            del student, teacher_logits, log_p, log_q
        sums_2R = sum_over_shards(sums_2R, shard)
        ctx.save_for_backward(hidden_PH, weight_VH, rows_R, teacher_RH, teacher_VH, normalizers_2R, sums_2R)
        ctx.shard, ctx.divergence = shard, divergence
        if divergence.kind == "jsd":
            return (1 - divergence.beta) * sums_2R[0] + divergence.beta * sums_2R[1]
        return sums_2R[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, rows_R, teacher_RH, teacher_VH, normalizers_2R, sums_2R = ctx.saved_tensors
        shard, divergence = ctx.shard, ctx.divergence
        weight, teacher = weight_VH[: shard.size], OutputLayer(teacher_RH, teacher_VH[: shard.size])
        slope_R = grads[0] / divergence.temperature
        gradients = WeightGradients(hidden_PH, weight_VH, shard)
        for part in chunks(rows_R.numel(), divergence.chunk_rows):
            hidden = hidden_PH.index_select(0, rows_R[part])
            student = scaled_logits(hidden, weight, divergence.temperature)
            teacher_logits = scaled_logits(teacher.hidden_RH[part], teacher.weight_VH, divergence.temperature)
            log_p, log_q = (
                x.sub_(n[:, None]) for x, n in zip((student, teacher_logits), normalizers_2R[:, part], strict=True)
            )
            grad_logits = _logit_gradient(log_p, log_q, sums_2R[0, part], divergence).mul_(slope_R[part, None])
            gradients.add(rows_R[part], hidden, weight, grad_logits)
            del student, teacher_logits, log_p, log_q, grad_logits
        return *gradients.of_inputs(), None, None, None, None, None


def _sums(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """Returns this rank's part of two sums per row [2, C]: the divergence and 0, or KL(p||m) and KL(q||m)."""
    if divergence.kind == "reverse_kl":
        value = (log_p.exp() * (log_p - log_q)).sum(1)
        return torch.stack([value, torch.zeros_like(value)])
    if divergence.kind == "forward_kl":
        value = (log_q.exp() * (log_q - log_p)).sum(1)
        return torch.stack([value, torch.zeros_like(value)])
    above = _above_mixture(log_p, log_q, divergence.beta)
    student = (log_p.exp() * above).sum(1)
    teacher = (log_q.exp() * above.sub_(log_p).add_(log_q)).sum(1)
    return torch.stack([student, teacher])


def _logit_gradient(log_p: Tensor, log_q: Tensor, sum_C: Tensor, divergence: Divergence) -> Tensor:
    """Returns the divergence's gradient by the student's scaled logits [C, V]; may overwrite its inputs."""
    if divergence.kind == "forward_kl":
        return log_p.exp_().sub_(log_q.exp_())
    if divergence.kind == "reverse_kl":
        return (log_p - log_q).sub_(sum_C[:, None]).mul_(log_p.exp_())
    above = _above_mixture(log_p, log_q, divergence.beta)
    return above.sub_(sum_C[:, None]).mul_(log_p.exp_()).mul_(1 - divergence.beta)


def _above_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Returns log p - log m of each token, where m = beta q + (1 - beta) p; exactly 0 where both are equal.

    Computed from the larger of both, so that nothing overflows: m = p (1 + beta (q/p - 1)) = q (1 + (1 - beta) (p/q -
    1)).
    """
    gap = log_q - log_p
    larger = gap > 0
    factor = torch.where(larger, 1 - beta, beta).to(gap.dtype)
    log_m = gap.abs().neg_().expm1_().mul_(factor).log1p_()
    return log_m.add_(torch.where(larger, gap, 0)).neg_()


class WeightGradients:
    """Gradients of hidden states and output weight, summed over chunks in fp32 (fp64 for fp64 weights)."""

    def __init__(self, hidden_PH: Tensor, weight_VH: Tensor, shard: VocabShard) -> None:
        self._dtypes, self._size = (hidden_PH.dtype, weight_VH.dtype), shard.size
        self._hidden = torch.zeros_like(hidden_PH, dtype=torch.promote_types(torch.float32, hidden_PH.dtype))
        self._weight = torch.zeros_like(weight_VH, dtype=torch.promote_types(torch.float32, weight_VH.dtype))

    def add(self, rows_C: Tensor, hidden_CH: Tensor, weight: Tensor, grad_logits: Tensor) -> None:
        """Adds the gradients of one chunk.

        Args:
            rows_C: Positions of the chunk's rows.
            hidden_CH: Hidden states of the chunk.
            weight: Output weight without padding rows.
            grad_logits: Gradient of the chunk's logits, [C, V].
        """
        scaled = grad_logits.to(weight.dtype)
        self._hidden.index_add_(0, rows_C, (scaled @ weight).to(self._hidden.dtype))
        self._weight[: self._size] += scaled.T @ hidden_CH

    def of_inputs(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of hidden states and output weight, in their dtypes."""
        return self._hidden.to(self._dtypes[0]), self._weight.to(self._dtypes[1])


def scaled_logits(hidden_CH: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Returns the logits divided by the temperature [C, V], at least fp32, in a new tensor."""
    logits = at_least_fp32(F.linear(hidden_CH, weight))
    return logits if temperature == 1.0 else logits.div_(temperature)


def log_normalizers(logits: tuple[Tensor, ...], shard: VocabShard) -> Tensor:
    """Collective over the group: returns log sum e^x over the full vocabulary, per tensor of logits and row [n, C].

    The sums are taken in rank order, so that every rank gets bit-identical results.
    """
    partial = []
    for each in logits:
        lowest = torch.finfo(each.dtype).min  # a rank may have no token
        largest = each.amax(1).clamp(min=lowest) if each.size(1) else each.new_full((each.size(0),), lowest)
        partial.append(torch.stack([largest, (each - largest[:, None]).exp_().sum(1)]))
    parts = gather_shards(torch.stack(partial), shard)  # [ranks, n, 2, C]
    largest = parts[:, :, 0].amax(0)
    return largest + ((parts[:, :, 0] - largest).exp() * parts[:, :, 1]).sum(0).log()


def sum_over_shards(partial: Tensor, shard: VocabShard) -> Tensor:
    """Collective over the group: returns the sum over the ranks, in rank order."""
    return gather_shards(partial, shard).sum(0)
