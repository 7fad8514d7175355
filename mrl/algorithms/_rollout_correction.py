"""The rollout correction of a loss: which log-probabilities its log-ratio is of, and what it changes.

Owns the order: mean of the weights, tokens that count, then the factors of each microbatch. The maths is in
`algorithms/functional/rollout_correction.py`, what the config asks for in `_correction_config.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrl.algorithms._correction_config import read
from mrl.algorithms.base import SumReduce, required
from mrl.algorithms.functional import correction_metrics
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.rollout_correction import (
    bounded,
    mean_weight,
    off_policy_kept,
    passes,
    raw_weights,
    statistic,
)
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.config.config import RolloutCorrectionConfig
from mrl.types import RolloutBatch


class Corrected(NamedTuple):
    """What a correction does to the loss of a microbatch.

    Attributes:
        weights_R: Factor of the policy loss; None: 1.
        policy_R: Where the policy loss counts, bool; None: everywhere.
        kept_R: Where the whole loss counts, bool; None: everywhere.
        tally: For the metrics.
    """

    weights_R: Tensor | None
    policy_R: Tensor | None
    kept_R: Tensor | None
    tally: dict[str, Tensor]


class Correction:
    """The section at work; `spec` says what it asks for."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.spec = read(config)

    @property
    def needs_current(self) -> bool:
        """Whether the policy in training is scored before its update: for numbers of the whole minibatch."""
        return not self.spec.decoupled and self._is_of_the_whole

    @property
    def reads_early(self) -> bool:
        """Whether a decoupled one reads the actor's log-probabilities before the loss: to count, or to divide."""
        return self.spec.decoupled and self._is_of_the_whole

    @property
    def _is_of_the_whole(self) -> bool:
        """Whether what is done to a token follows from all of the minibatch."""
        normalizes = self.spec.weighing is not None and self.spec.weighing.normalize
        return normalizes or (self.spec.kept_only and bool(self.spec.rejections))

    def actor_R(self, batch: RolloutBatch, logprobs_R: Tensor | None = None) -> Tensor | None:
        """The actor's log-probability in the log-ratio, without gradient; None where it is not known yet."""
        if self.spec.decoupled:
            return required(batch.proximal_logprobs_R, "proximal_logprobs_R").detach()
        if batch.current_logprobs_R is not None:
            return batch.current_logprobs_R.detach()
        return None if logprobs_R is None else logprobs_R.detach()

    def measure(self, batch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel where weights are normalised: sets `importance_mean_B`."""
        if self.spec.weighing is None or not self.spec.weighing.normalize:
            return
        sequences, log_ratio_R = _sequences(batch), self._log_ratio_R(batch, None)
        raw_R, _ = raw_weights(log_ratio_R, sequences, self.spec.weighing.level)
        mean = mean_weight(bounded(raw_R, self.spec.weighing), sequences, self.spec.weighing.level, reduce)
        batch.importance_mean_B = mean.to(log_ratio_R.dtype).expand(batch.num_sequences)

    def counted_R(self, batch: RolloutBatch) -> Tensor:
        """The tokens that a mean is over: the trained ones, without the rejected ones where those do not count."""
        actor_R = self.actor_R(batch) if self.spec.kept_only and self.spec.rejections else None
        if actor_R is None:
            return batch.response_mask_R
        return batch.response_mask_R & self._kept_R(batch, actor_R, {})

    def accepted_R(self, batch: RolloutBatch) -> Tensor | None:
        """The trained tokens that are not rejected, bool [R]; None where the update decides that, or nothing is."""
        if not (self.spec.decoupled and self.spec.rejections):
            return None
        return batch.response_mask_R & self._kept_R(batch, required(self.actor_R(batch), "proximal_logprobs_R"), {})

    def of(self, microbatch: RolloutBatch, logprobs_R: Tensor) -> Corrected:
        """What the loss of a microbatch is corrected by.

        Args:
            microbatch: Whole sequences, `advantages_R` set.
            logprobs_R: Of the policy in training.
        """
        weights_R, policy_R, kept_R = None, None, None
        tally: dict[str, Tensor] = {}
        sequences = _sequences(microbatch)
        if self.spec.weighing is not None:
            log_ratio_R = self._log_ratio_R(microbatch, logprobs_R)
            raw_R, logs_B = raw_weights(log_ratio_R, sequences, self.spec.weighing.level)
            weights_R = bounded(raw_R, self.spec.weighing)
            tally |= correction_metrics.weight_tally(self.spec.weighing, raw_R, logs_B, weights_R, sequences)
            if microbatch.importance_mean_B is not None:
                tally |= correction_metrics.divisor_tally(microbatch.importance_mean_B)
                weights_R = weights_R / microbatch.importance_mean_B[sequences.sequence_R]
        if self.spec.rejections:
            kept_R = self._kept_R(microbatch, required(self.actor_R(microbatch, logprobs_R), "logprobs_R"), tally)
        if self.spec.off_policy is not None:
            advantages_R = required(microbatch.advantages_R, "advantages_R")
            sampler_R = torch.where(sequences.mask_R, microbatch.rollout_logprobs_R, 0.0)
            policy_R = off_policy_kept(logprobs_R.detach(), sampler_R, advantages_R, sequences, self.spec.off_policy)
        return Corrected(weights_R, policy_R, kept_R, tally)

    def told(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a minibatch, reduced over it, with tallies told as verl does."""
        return correction_metrics.told(metrics, self.spec.weighing, self.spec.rejections)

    def _log_ratio_R(self, batch: RolloutBatch, logprobs_R: Tensor | None) -> Tensor:
        actor_R = required(self.actor_R(batch, logprobs_R), "current_logprobs_R")
        ratio_R = at_least_fp32(actor_R) - at_least_fp32(batch.rollout_logprobs_R)
        return torch.where(batch.response_mask_R, ratio_R, 0.0)

    def _kept_R(self, batch: RolloutBatch, actor_R: Tensor, tally: dict[str, Tensor]) -> Tensor:
        """Where all tests are passed; adds to the tally."""
        sequences = _sequences(batch)
        actor_R, sampler_R = (
            torch.where(sequences.mask_R, at_least_fp32(logprobs_R), 0.0)
            for logprobs_R in (actor_R, batch.rollout_logprobs_R)
        )
        kept_R = torch.ones_like(sequences.mask_R)
        for rejection in self.spec.rejections:
            value = statistic(rejection, actor_R, sampler_R, sequences)
            passed = passes(rejection, value)
            passed_R = passed if rejection.level == "token" else passed[sequences.sequence_R]
            tally |= correction_metrics.rejection_tally(rejection, value, passed_R, sequences)
            kept_R = kept_R & passed_R
        tally |= correction_metrics.kept_tally(kept_R, sequences)
        return kept_R


def _sequences(batch: RolloutBatch) -> Sequences:
    return Sequences(batch.response_mask_R, batch.sequence_R, batch.num_sequences)
