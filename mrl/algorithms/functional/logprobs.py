"""Log-probabilities and entropies of tokens from hidden states, with the vocabulary sharded over ranks.

The fused output layer of the trainer: forward and backward compute the logits of a chunk of rows at a time, so neither
fp32 logits nor all logits of a microbatch ever exist. The last chunk of the forward is the first of the backward and
stays in memory between them, so a microbatch of one chunk computes its logits once. Reductions over the hidden states'
own parallelism are left to the caller.

Shapes: P packed positions, R scored tokens, C rows of a chunk, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32
from mrl.types import SamplingMask


@dataclass(frozen=True)
class Distribution:
    """Settings of the scored distribution.

    Attributes:
        temperature: Divisor of the logits, above 0.
        chunk_rows: Number of rows of logits in memory at a time.
    """

    temperature: float = 1.0
    chunk_rows: int = 1024


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary range of the output weight's rows on this rank.

    Attributes:
        start: Token id of the first row.
        size: Number of rows that are tokens; later rows are padding, which is never scored and gets no gradient.
        group: Ranks that share the vocabulary, in the order of their shards; None: this rank has all of it.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None


class RowKernels(Protocol):
    """Row-wise kernels on fp32 logits: softmax sums and gradients."""

    def sums(self, logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes the softmax sums of each row; may overwrite the logits.

        Returns:
            (m, sum e^(x-m), sum (x-m) e^(x-m)) [3, C], with m the largest logit, at least the smallest finite number;
            and the number that was subtracted from each row in place [C], None if the logits were not changed.
        """

    def gradient(self, logits_CV: Tensor, normalizer_C: Tensor, slope_C: Tensor, bend_C: Tensor | None) -> Tensor:
        """Returns -p (slope + bend log p) with log p = x - normalizer, written over the logits; bend None means 0."""


class Operators:
    """`RowKernels` in PyTorch operators, for any device."""

    def sums(self, logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Implements `RowKernels.sums`; the largest logit is subtracted."""
        if not logits_CV.size(1):  # a rank may have no token
            return logits_CV.new_tensor([[_LEAST], [0.0], [0.0]]).expand(3, logits_CV.size(0)), None
        largest = logits_CV.amax(1).clamp(min=_LEAST)
        powers = logits_CV.sub_(largest[:, None]).exp()
        total = powers.sum(1)
        return torch.stack([largest, total, powers.mul_(logits_CV).sum(1)]), largest

    def gradient(self, logits_CV: Tensor, normalizer_C: Tensor, slope_C: Tensor, bend_C: Tensor | None) -> Tensor:
        """Implements `RowKernels.gradient`."""
        probs = logits_CV.sub_(normalizer_C[:, None]).exp_()
        surprise = None if bend_C is None else torch.xlogy(probs, probs).mul_(bend_C[:, None])
        probs.mul_(-slope_C[:, None])
        return probs if surprise is None else probs.sub_(surprise)


OPERATORS = Operators()

_LEAST = torch.finfo(torch.float32).min
_DROPPED = -1e30
"""Logit of a dropped token: its exponential is 0, and so is their product."""

AddsGradient = Callable[[Tensor, Tensor], Tensor]
"""(gradients of logits [C, V], hidden states [C, H]) -> adds their product to the weight's gradient buffer; returns a
placeholder gradient for autograd."""


class LogprobHead(Protocol):
    """Output layer whose logits and log-probabilities are bit-identical to an engine's; has the output weight."""

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Returns this rank's columns of the logits, padding included."""

    def full_logits(self, logits_CV: Tensor) -> Tensor:
        """Collective over `VocabShard.group`: returns the columns of all ranks, without padding."""

    def logprobs(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
        """Returns log softmax(logits / temperature) of the targets, fp32 [C]."""


def linear_logprobs(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows_R: Tensor,
    targets_R: Tensor,
    *,
    shard: VocabShard,
    distribution: Distribution,
    kept_tokens: SamplingMask | None = None,
    head: LogprobHead | None = None,
    of_rows: RowKernels = OPERATORS,
    adds_gradient: AddsGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Collective over `shard.group`: returns log p(target) and entropy of p = softmax(hidden weight^T / temperature).

    With a support, p is the softmax over the kept tokens only: log p(target) - log sum of kept p. The target counts as
    kept, so a row that keeps no token has log-probability and entropy 0, and no gradient.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group. Its gradient is this rank's part of the sum
            over the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions whose distribution is scored; a position may have several targets.
        targets_R: Token id scored at each of these positions.
        shard: Vocabulary range of the weight's rows.
        distribution: Temperature and chunk size.
        kept_tokens: Tokens kept at each of the R rows, the same on all ranks of the group; None: all.
        head: Output layer that computes the values; gradients and entropy are those of its logits. None: PyTorch.
        of_rows: Kernels for softmax sums and gradients.
        adds_gradient: Function that accumulates the weight's gradient, chunk by chunk; None: autograd does.

    Returns:
        logprobs_R and entropy_R in nats, fp32 (fp64 for an fp64 model), both differentiable. Logits are in the dtype of
        the weight, everything after them is in that of the result.

    Raises:
        ValueError: The temperature or the chunk size is not positive, or the support has another number of rows.
    """
    if distribution.temperature <= 0 or distribution.chunk_rows < 1:
        raise ValueError(
            f"temperature={distribution.temperature}, chunk_rows={distribution.chunk_rows}: must be positive."
        )
    if kept_tokens is not None and kept_tokens.counts_R.numel() != rows_R.numel():
        raise ValueError(f"the support has {kept_tokens.counts_R.numel()} rows, expected {rows_R.numel()}.")
    logprobs_R, entropy_R = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, rows_R, targets_R, shard, distribution, kept_tokens, head, of_rows, adds_gradient
    )
    return logprobs_R, entropy_R


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        rows_R: Tensor,
        targets_R: Tensor,
        shard: VocabShard,
        distribution: Distribution,
        support: SamplingMask | None,
        head: LogprobHead | None,
        of_rows: RowKernels,
        adds_gradient: AddsGradient | None,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH[: shard.size]
        # per row, over this rank's tokens: largest logit m; sums of e^(x-m) and (x-m) e^(x-m); the target's logit
        wide = torch.promote_types(torch.float32, hidden_PH.dtype)
        partial = torch.zeros((4, rows_R.numel()), dtype=wide, device=hidden_PH.device)
        logits: Tensor | None = None
        parts = chunks(rows_R.numel(), distribution.chunk_rows)
        kept = _support_of_chunks(support, parts)
        head_logprobs: list[Tensor] = []
        for part, own_kept in zip(parts, kept, strict=True):
            del logits  # free the previous chunk's before allocating this one's
            if head is None:
                logits, own = _scaled_logits(hidden_PH, weight, rows_R[part], targets_R[part], shard, distribution)
            else:
                raw = head.logits(hidden_PH.index_select(0, rows_R[part]))
                head_logprobs.append(_logprobs_of_head(head, raw, targets_R[part], distribution.temperature, own_kept))
                logits, own = _scaled(raw[:, : shard.size], targets_R[part], shard, distribution)
            target = logits.gather(1, own.clamp(min=0)[:, None]).squeeze(1) if shard.size else partial[3, part]
            if own_kept is not None:
                _drop(logits, own, own_kept, shard)
            partial[:3, part], taken = of_rows.sums(logits)
            partial[3, part] = torch.where(own >= 0, target, 0)
        largest, total, weighted, target = _combine(partial, shard)
        log_total = total.log()
        normalizer = largest + log_total
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden_PH, weight_VH, rows_R, targets_R, normalizer, entropy)
        ctx.shard, ctx.distribution, ctx.kept = shard, distribution, kept
        ctx.of_rows, ctx.adds_gradient = of_rows, adds_gradient
        ctx.last = None if logits is None else (logits, taken)
        ctx.set_materialize_grads(False)
        return torch.cat(head_logprobs) if head_logprobs else target - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, rows_R, targets_R, normalizer, entropy = ctx.saved_tensors
        shard, distribution = ctx.shard, ctx.distribution
        grad_logprobs, grad_entropy = grads
        weight = weight_VH[: shard.size]
        parts = chunks(rows_R.numel(), distribution.chunk_rows)
        grad_hidden = torch.zeros(hidden_PH.shape, dtype=normalizer.dtype, device=hidden_PH.device)
        grad_weight: Tensor | None = None
        # d log p(t) / d x = 1[t] - p;   d entropy / d x = -p (log p + entropy)
        slope, target_slope = torch.zeros_like(normalizer), None
        if grad_entropy is not None:
            grad_entropy = grad_entropy / distribution.temperature
            slope = grad_entropy * entropy
        if grad_logprobs is not None:
            target_slope = grad_logprobs / distribution.temperature
            slope = slope + target_slope
        last, ctx.last = ctx.last, None
        for part, own_kept in reversed(list(zip(parts, ctx.kept, strict=True))):
            rows, log_total = rows_R[part], normalizer[part]
            if last is not None:
                (logits, taken), own = last, _own_columns(targets_R[part], shard)
                log_total = log_total if taken is None else log_total - taken
            else:
                logits, own = _scaled_logits(hidden_PH, weight, rows, targets_R[part], shard, distribution)
                if own_kept is not None:
                    _drop(logits, own, own_kept, shard)
            last = None
            bend = None if grad_entropy is None else grad_entropy[part]
            grad_logits = ctx.of_rows.gradient(logits, log_total, slope[part], bend)
            if target_slope is not None and shard.size:
                grad_logits.scatter_add_(1, own.clamp(min=0)[:, None], (target_slope[part] * (own >= 0))[:, None])
            scaled = grad_logits.to(weight.dtype)
            grad_hidden.index_add_(0, rows, at_least_fp32(scaled @ weight))
            if ctx.needs_input_grad[1]:
                hidden = hidden_PH.index_select(0, rows)
                grad_weight = _add_weight_gradient(ctx, grad_weight, scaled, hidden, weight_VH, several=len(parts) > 1)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VH) if grad_weight is None else grad_weight.to(weight_VH.dtype)
        return grad_hidden.to(hidden_PH.dtype), grad_weight, *[None] * 8


def _add_weight_gradient(
    ctx: Any, total: Tensor | None, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor, *, several: bool
) -> Tensor:
    """Returns the weight's gradient with a chunk's part added; several chunks are summed in fp32."""
    if ctx.adds_gradient is not None:
        placeholder: Tensor = ctx.adds_gradient(grad_CV, hidden_CH)
        return placeholder
    if total is None:
        sum_dtype = torch.promote_types(torch.float32, weight_VH.dtype) if several else weight_VH.dtype
        total = torch.zeros(weight_VH.shape, dtype=sum_dtype, device=weight_VH.device)
    if total.dtype == grad_CV.dtype:
        total[: grad_CV.size(1)].addmm_(grad_CV.T, hidden_CH)
    else:
        total[: grad_CV.size(1)] += grad_CV.T @ hidden_CH
    return total


def _scaled_logits(
    hidden_PH: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, shard: VocabShard, distribution: Distribution
) -> tuple[Tensor, Tensor]:
    """Returns the logits over the temperature, fp32 [C, shard.size], and each target's column (-1 on other ranks)."""
    return _scaled(F.linear(hidden_PH.index_select(0, rows), weight), targets, shard, distribution)


def _scaled(logits: Tensor, targets: Tensor, shard: VocabShard, distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Divides logits by the temperature, maybe in place; returns the result of `_scaled_logits`."""
    logits = at_least_fp32(logits)
    if distribution.temperature != 1.0:
        logits.div_(distribution.temperature)
    return logits, _own_columns(targets, shard)


def _logprobs_of_head(
    head: LogprobHead, logits: Tensor, targets: Tensor, temperature: float, kept: SamplingMask | None
) -> Tensor:
    """Collective over the group: returns the log-probabilities of a chunk's targets over the kept tokens."""
    full_logits = head.full_logits(logits)
    if kept is None:
        return head.logprobs(full_logits, targets, temperature)
    full_logits = full_logits.float() / temperature
    _drop(full_logits, targets, kept, VocabShard(0, full_logits.size(1)))
    return head.logprobs(full_logits, targets, 1.0)


def _own_columns(targets: Tensor, shard: VocabShard) -> Tensor:
    """Returns each target's column in the logits of this rank, -1 if it is on another rank."""
    own = targets - shard.start
    return torch.where((own >= 0) & (own < shard.size), own, -1)


def _support_of_chunks(support: SamplingMask | None, chunks: list[slice]) -> Sequence[SamplingMask | None]:
    """Returns the support of each chunk."""
    return [None] * len(chunks) if support is None else support.split([part.stop - part.start for part in chunks])


def _drop(logits: Tensor, own: Tensor, kept: SamplingMask, shard: VocabShard) -> None:
    """Sets the logits of tokens that a chunk does not keep to `_DROPPED`, in place, except the target's."""
    rows = torch.arange(logits.size(0)).repeat_interleave(kept.counts_R)
    columns = kept.ids_K.long() - shard.start
    local = (columns >= 0) & (columns < shard.size)
    dropped = torch.ones_like(logits, dtype=torch.bool)
    dropped[rows[local].to(logits.device), columns[local].to(logits.device)] = False
    target_rows = (own >= 0).nonzero().squeeze(1)
    dropped[target_rows, own[target_rows]] = False
    logits.masked_fill_(dropped, _DROPPED)


def _combine(partial: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collective over the group: returns largest logit, both sums relative to it, and the target's logit.

    Ranks exchange four numbers per row; the sums are taken in rank order, so that every rank gets bit-identical
    results.
    """
    parts = gather_shards(partial, shard)
    largest = parts[:, 0].amax(0)
    lower = parts[:, 0] - largest
    factor = lower.exp()
    total = (factor * parts[:, 1]).sum(0)
    weighted = (factor * (parts[:, 2] + parts[:, 1] * lower)).sum(0)
    return largest, total, weighted, parts[:, 3].sum(0)


def chunks(count: int, size: int) -> list[slice]:
    """Returns the slices that cut `count` rows into chunks of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def gather_shards(own_part: Tensor, shard: VocabShard) -> Tensor:
    """Collective over the group: returns every rank's tensor [ranks, ...]."""
    if shard.group is None or dist.get_world_size(shard.group) == 1 or not own_part.numel():
        return own_part[None]
    received = [torch.empty_like(own_part) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(received, own_part.contiguous(), group=shard.group)
    return torch.stack(received)
