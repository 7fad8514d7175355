"""The rollout correction of a loss: importance weights, rejections and the off-policy mask.

Order: mean of the weights, accepted tokens, then the factors of each microbatch. The formulas are in
`algorithms/functional/rollout_correction.py`, the parsed config in `_correction_config.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrl.algorithms._correction_config import parse
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
    """Correction of a microbatch's loss.

    Attributes:
        weights_R: Factor of the policy loss; None: 1.
        policy_R: True where the policy loss counts; None: everywhere.
        kept_R: True where the complete loss counts; None: everywhere.
        tally: Sums from which the metrics are computed.
    """

    weights_R: Tensor | None
    policy_R: Tensor | None
    kept_R: Tensor | None
    tally: dict[str, Tensor]


class Correction:
    """Rollout correction of a run; `spec` is its parsed config."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.spec = parse(config)

    @property
    def needs_current(self) -> bool:
        """True if the current policy must be scored before its update, for statistics of the full minibatch."""
        return not self.spec.decoupled and self._needs_full_minibatch

    @property
    def reads_early(self) -> bool:
        """True if a decoupled correction reads the proximal log-probabilities before the loss."""
        return self.spec.decoupled and self._needs_full_minibatch

    @property
    def _needs_full_minibatch(self) -> bool:
        """True if the correction of a token depends on the full minibatch."""
        normalizes = self.spec.weighing is not None and self.spec.weighing.normalize
        return normalizes or (self.spec.kept_only and bool(self.spec.rejections))

    def actor_R(self, batch: RolloutBatch, logprobs_R: Tensor | None = None) -> Tensor | None:
        """Returns the actor's log-probability in the log-ratio, without gradient, [R]; None if it is not known yet."""
        if self.spec.decoupled:
            return required(batch.proximal_logprobs_R, "proximal_logprobs_R").detach()
        if batch.current_logprobs_R is not None:
            return batch.current_logprobs_R.detach()
        return None if logprobs_R is None else logprobs_R.detach()

    def measure(self, batch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel if weights are normalised: sets `importance_mean_B`."""
        if self.spec.weighing is None or not self.spec.weighing.normalize:
            return
        sequences, log_ratio_R = _sequences(batch), self._log_ratio_R(batch, None)
        raw_R, _ = raw_weights(log_ratio_R, sequences, self.spec.weighing.level)
        mean = mean_weight(bounded(raw_R, self.spec.weighing), sequences, self.spec.weighing.level, reduce)
        batch.importance_mean_B = mean.to(log_ratio_R.dtype).expand(batch.num_sequences)

    def counted_R(self, batch: RolloutBatch) -> Tensor:
        """Returns the tokens over which losses are averaged, bool [R]; rejected tokens may be excluded."""
        actor_R = self.actor_R(batch) if self.spec.kept_only and self.spec.rejections else None
        if actor_R is None:
            return batch.response_mask_R
        return batch.response_mask_R & self._kept_R(batch, actor_R, {})

    def accepted_R(self, batch: RolloutBatch) -> Tensor | None:
        """Returns the trained tokens that pass all tests, bool [R]; None without tests or before the update."""
        if not (self.spec.decoupled and self.spec.rejections):
            return None
        return batch.response_mask_R & self._kept_R(batch, required(self.actor_R(batch), "proximal_logprobs_R"), {})

    def for_microbatch(self, microbatch: RolloutBatch, logprobs_R: Tensor) -> Corrected:
        """Returns the correction of a microbatch's loss.

        Args:
            microbatch: Complete sequences with `advantages_R` set.
            logprobs_R: Log-probabilities of the current policy.
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

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the reduced metrics of a minibatch, with tallies replaced by verl's metrics."""
        return correction_metrics.summarize(metrics, self.spec.weighing, self.spec.rejections)

    def _log_ratio_R(self, batch: RolloutBatch, logprobs_R: Tensor | None) -> Tensor:
        actor_R = required(self.actor_R(batch, logprobs_R), "current_logprobs_R")
        ratio_R = at_least_fp32(actor_R) - at_least_fp32(batch.rollout_logprobs_R)
        return torch.where(batch.response_mask_R, ratio_R, 0.0)

    def _kept_R(self, batch: RolloutBatch, actor_R: Tensor, tally: dict[str, Tensor]) -> Tensor:
        """Returns where all tests are passed, bool [R]; adds to the tally."""
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
