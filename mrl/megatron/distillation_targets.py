"""Comparison of a student with its teachers over full distributions, computed where the student's logits are.

Selects each token's teacher and divergence. The formulas, which never build the logits of all tokens at once, are in
`algorithms/functional/divergences.py` and `algorithms/functional/topk_distillation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from mrl.algorithms.functional.divergences import Divergence, DivergenceKind, OutputLayer, linear_divergence
from mrl.algorithms.functional.logprobs import VocabShard
from mrl.algorithms.functional.topk_distillation import linear_logprobs_of, top_forward_kl, top_tokens
from mrl.config.config import TOP_K, DistillationLossConfig


@dataclass(frozen=True)
class DistillationSpec:
    """Settings and output weights for the comparison with teachers.

    Attributes:
        config: Settings of the loss; its mode compares distributions (it is not a sampled one).
        temperature: Divisor of the logits of student and teacher.
        chunk_rows: Number of rows of logits in memory at a time.
        weights: Output weight of each teacher on this rank, on ranks of the last pipeline stage. Its rows are the
            student's tokens from the same first token on, up to the end of the teacher's vocabulary.
    """

    config: DistillationLossConfig
    temperature: float
    chunk_rows: int
    weights: Sequence[Tensor]

    def on(self, device: torch.device) -> DistillationSpec:
        """Copies the weights to a device."""
        return replace(self, weights=[weight.to(device, non_blocking=True) for weight in self.weights])

    @property
    def num_scores(self) -> int:
        """Number of scores per token: the divergence, and for top-k the student's and teacher's probability mass."""
        return 3 if self.config.loss_mode == TOP_K else 1


@dataclass(frozen=True)
class DistillationTargets:
    """Teachers of the scored tokens.

    Attributes:
        comparison: Settings and output weights.
        teacher_R: Index of each token's teacher in `comparison.weights`.
        states_RH: Final hidden state of that teacher where it predicts the token; in host memory until it is used.
    """

    comparison: DistillationSpec
    teacher_R: Tensor
    states_RH: Tensor

    def at(self, mask_R: Tensor) -> DistillationTargets:
        """Selects the tokens where the mask is True."""
        return replace(self, teacher_R=self.teacher_R[mask_R], states_RH=self.states_RH[mask_R])

    def scores(self, hidden_PH: Tensor, weight_VH: Tensor, rows_R: Tensor, shard: VocabShard) -> tuple[Tensor, ...]:
        """Collective over `shard.group`: returns `num_scores` numbers per token, of which the first is differentiable.

        Args:
            hidden_PH: Final hidden states of the student, the same on all ranks of the group.
            weight_VH: Output weight of the student on this rank.
            rows_R: Positions at which the student predicts the tokens.
            shard: Vocabulary range of the weight's rows.
        """
        teachers = self.comparison.weights
        states_RH = self.states_RH.to(hidden_PH.device, hidden_PH.dtype)
        scores: tuple[Tensor, ...] | None = None
        for index, weight in enumerate(teachers):
            # the same on all ranks of the group; the first teacher runs even without tokens, to build the graph
            own = (self.teacher_R == index).nonzero().squeeze(1).to(hidden_PH.device)
            if index and not own.numel():
                continue
            common = replace(shard, size=min(shard.size, weight.size(0)))
            teacher = OutputLayer(states_RH[own, : weight.size(1)], weight)  # states are padded to the widest teacher
            part_scores = self._teacher_scores(hidden_PH, weight_VH, rows_R[own], teacher, common)
            if scores is None:
                scores = tuple(each.new_zeros(rows_R.numel()) for each in part_scores)
            scores = tuple(all_R.index_copy(0, own, part) for all_R, part in zip(scores, part_scores, strict=True))
        if scores is None:
            raise RuntimeError("there are no teachers to compare with")
        return scores

    def _teacher_scores(
        self, hidden_PH: Tensor, weight_VH: Tensor, rows_R: Tensor, teacher: OutputLayer, shard: VocabShard
    ) -> tuple[Tensor, ...]:
        comparison = self.comparison
        mode = comparison.config.loss_mode
        if mode != TOP_K:
            divergence = Divergence(
                cast(DivergenceKind, mode), comparison.config.beta, comparison.temperature, comparison.chunk_rows
            )
            return (linear_divergence(hidden_PH, weight_VH, rows_R, teacher, shard=shard, divergence=divergence),)
        all_rows = torch.arange(rows_R.numel(), device=rows_R.device)
        ids_RK, teacher_RK = top_tokens(
            *teacher,
            all_rows,
            comparison.config.topk,
            shard=shard,
            temperature=comparison.temperature,
            chunk_rows=comparison.chunk_rows,
        )
        student_RK = linear_logprobs_of(
            hidden_PH,
            weight_VH,
            rows_R,
            ids_RK,
            shard=shard,
            temperature=comparison.temperature,
            chunk_rows=comparison.chunk_rows,
        )
        return tuple(top_forward_kl(student_RK, teacher_RK, comparison.config.log_prob_min_clamp))
