"""Distillation from a teacher's most likely tokens: which they are, what the student gives them, and their KL.

Owns top-k over a vocabulary that is split over ranks, chunk by chunk as in `divergences.py`: no tensor of all rows and
all tokens ever exists, and what is exchanged and kept is [R, K].

Shapes: P packed positions, R scored rows, K tokens of each, V this rank's part of the vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.functional.divergences import (
    WeightGradients,
    chunks,
    log_normalizers,
    scaled_logits,
    sum_over_shards,
)
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.logprobs import VocabShard


class TopKl(NamedTuple):
    """Of each row.

    Attributes:
        loss_R: Forward KL over the teacher's tokens, at least 0.
        student_mass_R: What the student gives to them together, a constant.
        teacher_mass_R: What the teacher gives to them together.
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
    """Collective over `shard.group`: the k most likely tokens at each row, no gradient.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions.
        k: Tokens, at most the whole vocabulary's.
        shard: Which tokens the weight's rows are.
        temperature: Divides the logits, above 0.
        chunk_rows: Rows of logits that exist at a time.

    Returns:
        ids_RK, int64, the most likely first, and their log-probabilities over the whole vocabulary, nats, fp32.
    """
    ids, logprobs = [], []
    with torch.no_grad():
        for part in chunks(rows_R.numel(), chunk_rows):
            logits = scaled_logits(hidden_PH.index_select(0, rows_R[part]), weight_VH[: shard.size], temperature)
            normalizer_C = log_normalizers((logits,), shard)[0]
            found, place = logits.topk(min(k, shard.size), dim=1)
            mine = found.new_full((2, found.size(0), k), -torch.inf)
            mine[0, :, : found.size(1)] = found - normalizer_C[:, None]
            own_ids = torch.zeros((found.size(0), k), dtype=torch.int64, device=found.device)
            own_ids[:, : found.size(1)] = place + shard.start
            all_found, all_ids = _candidates(mine[0], own_ids, shard)
            best, order = all_found.topk(k, dim=1)
            ids.append(all_ids.gather(1, order))
            logprobs.append(best)
    empty = torch.zeros((0, k), device=hidden_PH.device)
    return torch.cat([empty.long(), *ids]), torch.cat([empty, *logprobs]) if logprobs else empty


def _candidates(found: Tensor, ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Collective over the group: the best of every rank [C, ranks x k], in the order of token ids of the ranks."""
    if shard.group is None or dist.get_world_size(shard.group) == 1:
        return found, ids
    size = dist.get_world_size(shard.group)
    values, tokens = [torch.empty_like(found) for _ in range(size)], [torch.empty_like(ids) for _ in range(size)]
    dist.all_gather(values, found.contiguous(), group=shard.group)
    dist.all_gather(tokens, ids.contiguous(), group=shard.group)
    return torch.cat(values, 1), torch.cat(tokens, 1)


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
    """Collective over `shard.group`: log-probabilities of several tokens at each row, logits computed once.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group. Its gradient is this rank's part of the sum
            over the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions.
        ids_RK: Tokens of each, which must be different ones.
        shard: Which tokens the weight's rows are.
        temperature: Divides the logits, above 0.
        chunk_rows: Rows of logits that exist at a time.

    Returns:
        logprobs_RK, nats, differentiable; fp32, or fp64 of fp64.
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
            place, here = _places(ids_RK[part], shard)
            if shard.size:
                chosen_RK[part] = torch.where(here, logits.gather(1, place), 0)
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
            place, here = _places(ids_RK[part], shard)
            if shard.size:
                grad_logits.scatter_add_(1, place, torch.where(here, slope_RK[part], 0))
            gradients.add(rows_R[part], hidden, weight, grad_logits)
        return *gradients.of_inputs(), None, None, None, None, None


def _places(ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each token in the logits of this rank, 0 for those that are elsewhere, and which are here."""
    own = ids - shard.start
    here = (own >= 0) & (own < shard.size)
    return torch.where(here, own, 0), here


def top_forward_kl(logprobs_RK: Tensor, teacher_logprobs_RK: Tensor, min_logprob: float | None) -> TopKl:
    """Forward KL over the teacher's most likely tokens: sum q (log q - log p), at least 0.

    Neither distribution is normalised over these tokens: with K the whole vocabulary it is the forward KL; with fewer
    it may fall below 0, where it is cut and has no gradient.

    Args:
        logprobs_RK: The student's, nats, with gradient.
        teacher_logprobs_RK: The teacher's, constants.
        min_logprob: Both are raised to this; the student's then get no gradient. None: neither.

    Source: verl's `forward_kl_topk` (`distillation_loss.log_prob_min_clamp`).
    """
    student_RK, teacher_RK = at_least_fp32(logprobs_RK), at_least_fp32(teacher_logprobs_RK.detach())
    student_mass_R = student_RK.detach().exp().sum(1)
    if min_logprob is not None:
        student_RK, teacher_RK = student_RK.clamp(min=min_logprob), teacher_RK.clamp(min=min_logprob)
    weight_RK = teacher_RK.exp()
    loss_R = (weight_RK * (teacher_RK - student_RK)).sum(1).clamp(min=0)
    return TopKl(loss_R, student_mass_R, weight_RK.sum(1))
