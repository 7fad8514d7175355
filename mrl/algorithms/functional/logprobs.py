"""Log-probability and entropy of chosen tokens from hidden states, the vocabulary split over ranks.

Owns the fused output layer of the trainer: it computes logits for a chunk of rows at a time, forward and again
backward, so that neither fp32 logits nor all logits of a microbatch ever exist. The last chunk of the forward is the
first of the backward and stays in memory between them: one that holds all rows is computed once. Reductions over the
hidden states' own parallelism are the caller's.

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

from mrl.types import Support


@dataclass(frozen=True)
class Distribution:
    """Which distribution is scored, and how: the sampling contract.

    Attributes:
        temperature: Divides the logits, above 0.
        chunk_rows: Rows of logits that exist at a time.
    """

    temperature: float = 1.0
    chunk_rows: int = 1024


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output weight on this rank.

    Attributes:
        start: Token id of the first row.
        size: Rows that are tokens; rows behind them are padding, which is never scored and gets no gradient.
        group: Ranks that share the vocabulary, in the order of their shards; None: this rank has all of it.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None


class Rows(Protocol):
    """What is computed of each row of fp32 logits by itself."""

    def sums(self, logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of each row the largest m, at least the least finite number, and the sums of e^(x-m) and (x-m) e^(x-m).

        Returns:
            [3, C], and what was taken away from each row in place.
        """

    def gradient(self, logits_CV: Tensor, normalizer_C: Tensor, slope_C: Tensor, bend_C: Tensor | None) -> Tensor:
        """-p (slope + bend log p) with log p = x - normalizer, in the place of the logits; no bend: 0."""


class Operators:
    """`Rows` by PyTorch's operators, on any device."""

    def sums(self, logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Rows`; the largest is taken away."""
        if not logits_CV.size(1):  # a rank may have no token
            return logits_CV.new_tensor([[_LEAST], [0.0], [0.0]]).expand(3, logits_CV.size(0)), None
        largest = logits_CV.amax(1).clamp(min=_LEAST)
        powers = logits_CV.sub_(largest[:, None]).exp()
        total = powers.sum(1)
        return torch.stack([largest, total, powers.mul_(logits_CV).sum(1)]), largest

    def gradient(self, logits_CV: Tensor, normalizer_C: Tensor, slope_C: Tensor, bend_C: Tensor | None) -> Tensor:
        """See `Rows`."""
        probs = logits_CV.sub_(normalizer_C[:, None]).exp_()
        surprise = None if bend_C is None else torch.xlogy(probs, probs).mul_(bend_C[:, None])
        probs.mul_(-slope_C[:, None])
        return probs if surprise is None else probs.sub_(surprise)


OPERATORS = Operators()

_LEAST = torch.finfo(torch.float32).min
_DROPPED = -1e30
"""In place of a logit: its power is 0, and so is their product."""

AddsGradient = Callable[[Tensor, Tensor], Tensor]
"""(gradients of logits [C, V], hidden states [C, H]) -> adds their product to the weight's gradient; a stand-in."""


class Head(Protocol):
    """Computes logits and log-probabilities in the bits in which an engine does; holds the output weight."""

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """This rank's columns, padding included."""

    def whole(self, logits_CV: Tensor) -> Tensor:
        """Collective over `VocabShard.group`: the columns of all ranks, without padding."""

    def logprobs(self, whole_CV: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
        """Of the targets, fp32 [C]: log softmax(logits / temperature)."""


def linear_logprobs(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows_R: Tensor,
    targets_R: Tensor,
    *,
    shard: VocabShard,
    distribution: Distribution,
    support: Support | None = None,
    head: Head | None = None,
    of_rows: Rows = OPERATORS,
    adds_gradient: AddsGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Collective over `shard.group`: log p(target) and entropy of softmax(hidden weight^T / temperature), by row.

    With a support p is that of softmax over the kept tokens alone, whatever the logits are: log p(target) - log sum of
    kept p. The target counts as kept, so a row that keeps nothing has log-probability and entropy 0, and no gradient.

    Args:
        hidden_PH: Final hidden states, the same on all ranks of the group. Its gradient is this rank's part of the sum
            over the group.
        weight_VH: Output weight of this rank, padding rows included.
        rows_R: Positions whose distribution is scored, one of them maybe for several targets.
        targets_R: Token id scored at each of them.
        shard: Which tokens the weight's rows are.
        distribution: Temperature, chunk size.
        support: Tokens kept at each of the R rows, the same on all ranks of the group; None: all.
        head: Computes the values; gradients and entropy are those of its logits. None: PyTorch does.
        of_rows: What is between the products.
        adds_gradient: Takes the gradient of the weight, chunk by chunk; None: autograd gets it.

    Returns:
        logprobs_R and entropy_R in nats, fp32, both differentiable. Logits are in the dtype of the weight,
        everything after them is fp32.

    Raises:
        ValueError: The temperature or the chunk size is not positive, or the support is of other rows.
    """
    if distribution.temperature <= 0 or distribution.chunk_rows < 1:
        raise ValueError(
            f"temperature={distribution.temperature}, chunk_rows={distribution.chunk_rows}: must be positive"
        )
    if support is not None and support.counts_R.numel() != rows_R.numel():
        raise ValueError(f"a support of {support.counts_R.numel()} rows came, expected one of {rows_R.numel()}")
    logprobs_R, entropy_R = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, rows_R, targets_R, shard, distribution, support, head, of_rows, adds_gradient
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
        support: Support | None,
        head: Head | None,
        of_rows: Rows,
        adds_gradient: AddsGradient | None,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH[: shard.size]
        # of this rank's tokens, at each row: largest logit m; sums of e^(x-m) and (x-m) e^(x-m); the target's logit
        partial = torch.zeros((4, rows_R.numel()), dtype=torch.float32, device=hidden_PH.device)
        logits: Tensor | None = None
        chunks = _chunks(rows_R.numel(), distribution.chunk_rows)
        kept = _kept(support, chunks)
        told: list[Tensor] = []  # by the head
        for part, own_kept in zip(chunks, kept, strict=True):
            del logits  # the last chunk's, before this chunk's exist
            if head is None:
                logits, own = _scaled_logits(hidden_PH, weight, rows_R[part], targets_R[part], shard, distribution)
            else:
                raw = head.logits(hidden_PH.index_select(0, rows_R[part]))
                told.append(_logprobs_of_head(head, raw, targets_R[part], distribution.temperature, own_kept))
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
        return torch.cat(told) if told else target - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, rows_R, targets_R, normalizer, entropy = ctx.saved_tensors
        shard, distribution = ctx.shard, ctx.distribution
        grad_logprobs, grad_entropy = grads
        weight = weight_VH[: shard.size]
        chunks = _chunks(rows_R.numel(), distribution.chunk_rows)
        grad_hidden = torch.zeros(hidden_PH.shape, dtype=torch.float32, device=hidden_PH.device)
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
        for part, own_kept in reversed(list(zip(chunks, ctx.kept, strict=True))):
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
            grad_hidden.index_add_(0, rows, (scaled @ weight).float())
            hidden = hidden_PH.index_select(0, rows)
            if ctx.adds_gradient is not None:
                grad_weight = ctx.adds_gradient(scaled, hidden)
                continue
            if grad_weight is None:  # several chunks add up in fp32
                sum_dtype = torch.float32 if len(chunks) > 1 else weight_VH.dtype
                grad_weight = torch.zeros(weight_VH.shape, dtype=sum_dtype, device=weight_VH.device)
            if grad_weight.dtype == weight.dtype:
                grad_weight[: shard.size].addmm_(scaled.T, hidden)
            else:
                grad_weight[: shard.size] += scaled.T @ hidden
        grad_weight = torch.zeros_like(weight_VH) if grad_weight is None else grad_weight.to(weight_VH.dtype)
        return grad_hidden.to(hidden_PH.dtype), grad_weight, *[None] * 8


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(
    hidden_PH: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, shard: VocabShard, distribution: Distribution
) -> tuple[Tensor, Tensor]:
    """Logits over the temperature, fp32 [C, shard.size], and each target's column here, -1 if it is elsewhere."""
    return _scaled(F.linear(hidden_PH.index_select(0, rows), weight), targets, shard, distribution)


def _scaled(logits: Tensor, targets: Tensor, shard: VocabShard, distribution: Distribution) -> tuple[Tensor, Tensor]:
    """As `_scaled_logits`, of logits, which may be overwritten."""
    logits = logits.float()
    if distribution.temperature != 1.0:
        logits.div_(distribution.temperature)
    return logits, _own_columns(targets, shard)


def _logprobs_of_head(head: Head, logits: Tensor, targets: Tensor, temperature: float, kept: Support | None) -> Tensor:
    """Collective over the group: log-probabilities of a chunk's targets, of what is kept of softmax(logits / T)."""
    whole = head.whole(logits)
    if kept is None:
        return head.logprobs(whole, targets, temperature)
    whole = whole.float() / temperature
    _drop(whole, targets, kept, VocabShard(0, whole.size(1)))
    return head.logprobs(whole, targets, 1.0)


def _own_columns(targets: Tensor, shard: VocabShard) -> Tensor:
    """Each target's column in the logits of this rank, -1 if it is elsewhere."""
    own = targets - shard.start
    return torch.where((own >= 0) & (own < shard.size), own, -1)


def _kept(support: Support | None, chunks: list[slice]) -> Sequence[Support | None]:
    """The part of the support of each chunk."""
    return [None] * len(chunks) if support is None else support.split([part.stop - part.start for part in chunks])


def _drop(logits: Tensor, own: Tensor, kept: Support, shard: VocabShard) -> None:
    """Sets what a chunk does not keep to `_DROPPED`, in place; never the target."""
    rows = torch.arange(logits.size(0)).repeat_interleave(kept.counts_R)
    columns = kept.ids_K.long() - shard.start
    here = (columns >= 0) & (columns < shard.size)
    dropped = torch.ones_like(logits, dtype=torch.bool)
    dropped[rows[here].to(logits.device), columns[here].to(logits.device)] = False
    held = (own >= 0).nonzero().squeeze(1)
    dropped[held, own[held]] = False
    logits.masked_fill_(dropped, _DROPPED)


def _combine(partial: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collective over the group: largest logit, both sums relative to it, and the target's logit, over all ranks.

    One exchange of four numbers a row; the sums are taken in rank order, so that every rank has the same bits.
    """
    if shard.group is None or dist.get_world_size(shard.group) == 1 or not partial.size(1):
        parts = partial[None]
    else:
        received = [torch.empty_like(partial) for _ in range(dist.get_world_size(shard.group))]
        dist.all_gather(received, partial, group=shard.group)
        parts = torch.stack(received)
    largest = parts[:, 0].amax(0)
    lower = parts[:, 0] - largest
    factor = lower.exp()
    total = (factor * parts[:, 1]).sum(0)
    weighted = (factor * (parts[:, 2] + parts[:, 1] * lower)).sum(0)
    return largest, total, weighted, parts[:, 3].sum(0)
