"""Distillation from a teacher's top-k tokens: their selection, the student's log-probabilities, and the KL.

The top-k over a sharded vocabulary is computed chunk by chunk as in `divergences.py`: no tensor of all rows and all
tokens ever exists, and only [R, K] numbers are exchanged and kept.

Shapes: P packed positions, R scored rows, K tokens of each, V this rank's part of the vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.functional.divergences import (
    WeightGradients,
    log_normalizers,
    scaled_logits,
    sum_over_shards,
)
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.logprobs import VocabShard, chunks, gather_shards


class TopKl(NamedTuple):
    """Forward KL of each row over the teacher's top-k tokens.

    Attributes:
        loss_R: Forward KL over these tokens, at least 0.
        student_mass_R: Total probability of these tokens by the student, a constant.
        teacher_mass_R: Total probability of these tokens by the teacher.
    """

    loss_R: Tensor
    student_mass_R: Tensor
    teacher_mass_R: Tensor


def top_tokens(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows_R: Tensor,
    k: int,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Collective over `shard.group`: returns the k most likely tokens at each row, without gradient.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions to score.
        k: Number of tokens, at most the full vocabulary's.
        shard: Vocabulary range of the weight's rows.
        temperature: Divisor of the logits, above 0.
        chunk_rows: Number of rows of logits in memory at a time.

    Returns:
        ids_RK, int64, the most likely first, and their log-probabilities over the full vocabulary, nats, fp32.
    """
    ids, logprobs = [], []
    with torch.no_grad():
        for part in chunks(rows_R.numel(), chunk_rows):
            logits = scaled_logits(hidden_PH.index_select(0, rows_R[part]), weight_VH[: shard.size], temperature)
            normalizer_C = log_normalizers((logits,), shard)[0]
            found, columns = logits.topk(min(k, shard.size), dim=1)
            own_logprobs = found.new_full((2, found.size(0), k), -torch.inf)
            own_logprobs[0, :, : found.size(1)] = found - normalizer_C[:, None]
            own_ids = torch.zeros((found.size(0), k), dtype=torch.int64, device=found.device)
            own_ids[:, : found.size(1)] = columns + shard.start
            all_found, all_ids = (torch.cat([*gather_shards(each, shard)], 1) for each in (own_logprobs[0], own_ids))
            best, order = all_found.topk(k, dim=1)
            ids.append(all_ids.gather(1, order))
            logprobs.append(best)
    empty = torch.zeros((0, k), device=hidden_PH.device)
    return torch.cat([empty.long(), *ids]), torch.cat([empty, *logprobs]) if logprobs else empty


def linear_logprobs_of(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows_R: Tensor,
    ids_RK: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
) -> Tensor:
    """Collective over `shard.group`: returns the log-probabilities of several tokens per row; logits computed once.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group. Its gradient is this rank's part of the sum
            over the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions to score.
        ids_RK: Token ids to score at each position, without duplicates.
        shard: Vocabulary range of the weight's rows.
        temperature: Divisor of the logits, above 0.
        chunk_rows: Number of rows of logits in memory at a time.

    Returns:
        logprobs_RK, nats, differentiable; fp32, or fp64 for fp64 weights.
    """
    found: Tensor = _LinearLogprobsOf.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, rows_R, ids_RK, shard, temperature, chunk_rows
    )
    return found


class _LinearLogprobsOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        rows_R: Tensor,
        ids_RK: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_rows: int,
    ) -> Tensor:
        weight = weight_VH[: shard.size]
        dtype = torch.promote_types(torch.float32, weight_VH.dtype)
        normalizer_R = torch.zeros(rows_R.numel(), dtype=dtype, device=hidden_PH.device)
        chosen_RK = torch.zeros(ids_RK.shape, dtype=dtype, device=hidden_PH.device)
        for part in chunks(rows_R.numel(), chunk_rows):
            logits = scaled_logits(hidden_PH.index_select(0, rows_R[part]), weight, temperature)
            normalizer_R[part] = log_normalizers((logits,), shard)[0]
            columns, local = _local_columns(ids_RK[part], shard)
            if shard.size:
                chosen_RK[part] = torch.where(local, logits.gather(1, columns), 0)
        chosen_RK = sum_over_shards(chosen_RK, shard)
        ctx.save_for_backward(hidden_PH, weight_VH, rows_R, ids_RK, normalizer_R)
        ctx.settings = shard, temperature, chunk_rows
        return chosen_RK - normalizer_R[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, rows_R, ids_RK, normalizer_R = ctx.saved_tensors
        shard, temperature, chunk_rows = ctx.settings
        weight = weight_VH[: shard.size]
        slope_RK = grads[0] / temperature
        gradients = WeightGradients(hidden_PH, weight_VH, shard)
        for part in chunks(rows_R.numel(), chunk_rows):
            hidden = hidden_PH.index_select(0, rows_R[part])
            logits = scaled_logits(hidden, weight, temperature)
            grad_logits = logits.sub_(normalizer_R[part, None]).exp_().mul_(-slope_RK[part].sum(1, keepdim=True))
            columns, local = _local_columns(ids_RK[part], shard)
            if shard.size:
                grad_logits.scatter_add_(1, columns, torch.where(local, slope_RK[part], 0))
            gradients.add(rows_R[part], hidden, weight, grad_logits)
        return *gradients.of_inputs(), None, None, None, None, None


def _local_columns(ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns each token's column in the logits of this rank (0 if on another rank), and whether it is on this rank."""
    own = ids - shard.start
    local = (own >= 0) & (own < shard.size)
    return torch.where(local, own, 0), local


def top_forward_kl(logprobs_RK: Tensor, teacher_logprobs_RK: Tensor, min_logprob: float | None) -> TopKl:
    """Returns the forward KL over the teacher's most likely tokens: sum q (log q - log p), at least 0.

    Neither distribution is normalised over these tokens. If K is the full vocabulary, the result is the forward KL;
    with fewer tokens the sum may be negative, and is then clamped to 0 without gradient.

    Args:
        logprobs_RK: Log-probabilities by the student, nats, with gradient.
        teacher_logprobs_RK: Log-probabilities by the teacher, nats, constants.
        min_logprob: Lower clamp of both, where the student's get no gradient; None: no clamp.

    Source: verl's `forward_kl_topk` (`distillation_loss.log_prob_min_clamp`).
    """
    student_RK, teacher_RK = at_least_fp32(logprobs_RK), at_least_fp32(teacher_logprobs_RK.detach())
    student_mass_R = student_RK.detach().exp().sum(1)
    if min_logprob is not None:
        student_RK, teacher_RK = student_RK.clamp(min=min_logprob), teacher_RK.clamp(min=min_logprob)
    weight_RK = teacher_RK.exp()
    loss_R = (weight_RK * (teacher_RK - student_RK)).sum(1).clamp(min=0)
    return TopKl(loss_R, student_mass_R, weight_RK.sum(1))
