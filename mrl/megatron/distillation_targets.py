"""Student and teachers compared over their whole distributions, where the student's logits are made.

Owns which teacher a token is compared with and by what. The arithmetic, which never makes logits of all tokens at a
time, is in `algorithms/functional/divergences.py` and `algorithms/functional/topk_distillation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from mrl.algorithms.functional.divergences import Divergence, Kind, OutputLayer, linear_divergence
from mrl.algorithms.functional.logprobs import VocabShard
from mrl.algorithms.functional.topk_distillation import linear_logprobs_of, top_forward_kl, top_tokens
from mrl.config.config import TOP_K, DistillationLossConfig


@dataclass(frozen=True)
class Comparison:
    """How a student is compared with its teachers at each scored token.

    Attributes:
        config: The loss mode, which is none of the sampled ones.
        temperature: Divides the logits of both.
        chunk_rows: Rows of logits that exist at a time.
        weights: Each teacher's output weight on this rank, its rows the student's tokens, from the same one on, as far
            as the teacher has them; on ranks of the last pipeline stage.
    """

    config: DistillationLossConfig
    temperature: float
    chunk_rows: int
    weights: Sequence[Tensor]

    def on(self, device: torch.device) -> Comparison:
        """With the weights there."""
        return replace(self, weights=[weight.to(device, non_blocking=True) for weight in self.weights])

    @property
    def num_scores(self) -> int:
        """Of a token: the divergence, and of the top-k form what each gives to the teacher's tokens."""
        return 3 if self.config.loss_mode == TOP_K else 1


@dataclass(frozen=True)
class Compared:
    """The scored tokens' teachers.

    Attributes:
        comparison: How they are compared.
        teacher_R: Which teacher, an index of `comparison.weights`.
        states_RH: Its final hidden state where it predicts the token; in host memory until it is used.
    """

    comparison: Comparison
    teacher_R: Tensor
    states_RH: Tensor

    def at(self, mask_R: Tensor) -> Compared:
        """Those of the tokens where the mask is True."""
        return replace(self, teacher_R=self.teacher_R[mask_R], states_RH=self.states_RH[mask_R])

    def scores(self, hidden_PH: Tensor, weight_VH: Tensor, rows_R: Tensor, shard: VocabShard) -> tuple[Tensor, ...]:
        """Collective over `shard.group`: `Comparison.num_scores` numbers of each token; the first is differentiable.

        Args:
            hidden_PH: The student's final hidden states, the same on all ranks of the group.
            weight_VH: Its output weight of this rank.
            rows_R: Where it predicts the tokens.
            shard: Which tokens the weight's rows are.
        """
        teachers = self.comparison.weights
        states_RH = self.states_RH.to(hidden_PH.device, hidden_PH.dtype)
        whole: tuple[Tensor, ...] | None = None
        for index, weight in enumerate(teachers):
            # the same on all ranks of the group; the first one's tokens make a graph where there are none, too
            own = (self.teacher_R == index).nonzero().squeeze(1).to(hidden_PH.device)
            if index and not own.numel():
                continue
            common = replace(shard, size=min(shard.size, weight.size(0)))
            teacher = OutputLayer(states_RH[own, : weight.size(1)], weight)  # filled up to the widest teacher's
            found = self._with(hidden_PH, weight_VH, rows_R[own], teacher, common)
            if whole is None:
                whole = tuple(each.new_zeros(rows_R.numel()) for each in found)
            whole = tuple(all_R.index_copy(0, own, part) for all_R, part in zip(whole, found, strict=True))
        if whole is None:
            raise RuntimeError("a token's teacher is none of those that there are")
        return whole

    def _with(
        self, hidden_PH: Tensor, weight_VH: Tensor, rows_R: Tensor, teacher: OutputLayer, shard: VocabShard
    ) -> tuple[Tensor, ...]:
        how = self.comparison
        mode = how.config.loss_mode
        if mode != TOP_K:
            divergence = Divergence(cast(Kind, mode), how.config.beta, how.temperature, how.chunk_rows)
            return (linear_divergence(hidden_PH, weight_VH, rows_R, teacher, shard=shard, divergence=divergence),)
        everywhere = torch.arange(rows_R.numel(), device=rows_R.device)
        ids_RK, teacher_RK = top_tokens(
            *teacher,
            everywhere,
            how.config.topk,
            shard=shard,
            temperature=how.temperature,
            chunk_rows=how.chunk_rows,
        )
        student_RK = linear_logprobs_of(
            hidden_PH,
            weight_VH,
            rows_R,
            ids_RK,
            shard=shard,
            temperature=how.temperature,
            chunk_rows=how.chunk_rows,
        )
        return tuple(top_forward_kl(student_RK, teacher_RK, how.config.log_prob_min_clamp))
