"""The base class of the policy-gradient algorithms, which assembles `functional/` into a loss and metrics.

Each algorithm's file has its defaults.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mrl.algorithms._kl_control import sequence_means
from mrl.algorithms._policy_loss import LOSSES, PolicyLoss, Tokens
from mrl.algorithms._rollout_correction import Correction
from mrl.algorithms.base import PROXIMAL, REFERENCE, Algorithm, Outcomes, SumReduce, required
from mrl.algorithms.functional.advantages import StdKind, group_relative, overlong_penalty, reward_to_go, whiten
from mrl.algorithms.functional.distributed_topk import highest
from mrl.algorithms.functional.importance import MAX_LOG_RATIO, at_least_fp32, log_ratio
from mrl.algorithms.functional.kl import kl_penalty
from mrl.algorithms.functional.losses import Surrogate
from mrl.algorithms.functional.sampling import stream_key, uniforms
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.types import RolloutBatch

CHOICE_SEED = 0x636F76
"""Seed of the random numbers that select tokens; it differs from the sampler's."""

ROUNDING = 1e-5
"""Largest difference, in nats, between engine and actor in fp32 at the same weights (order of summation)."""


class PolicyGradient(Algorithm):
    """Outcome advantage, policy loss, KL, entropy bonus and rollout correction."""

    unused: ClassVar[frozenset[str]] = frozenset()
    kl_places: ClassVar[frozenset[str]] = frozenset({"none", "loss"})

    baseline: ClassVar[Literal["none", "mean", "leave_one_out"]] = "mean"
    """Baseline that is subtracted from a sample's reward, within its group."""

    whitens: ClassVar[bool] = False
    """True if advantages are normalised over the trained tokens of the global batch. `advantage_std` and
    `advantage_eps` then apply to this normalisation, and the group's deviation is not used."""

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        super().__init__(config, rollout)
        self.correction = Correction(config.rollout_correction)

    def counted_R(self, batch: RolloutBatch) -> Tensor:
        """Returns the tokens over which losses are averaged, without rejected tokens that do not count, bool [R]."""
        return self.correction.counted_R(batch)

    def shape_rewards(self, outcomes: Outcomes) -> Tensor:
        """Returns the rewards plus the overlong penalty, fp64 [N]."""
        return outcomes.rewards_N.double() + self.penalty(outcomes)

    def penalty(self, outcomes: Outcomes) -> Tensor:
        """Returns the overlong penalty, fp64 [N], at most 0."""
        overlong = self.config.overlong
        return overlong_penalty(
            outcomes.response_lens_N,
            max_length=self.rollout.response_length,
            buffer_length=overlong.buffer_length,
            penalty=overlong.penalty,
        )

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the reward minus the baseline, over the group's deviation if the algorithm uses it, fp64 [N]."""
        if self.baseline == "none":
            return outcomes.rewards_N.double()
        return group_relative(
            outcomes.rewards_N,
            outcomes.group_id_N,
            baseline=self.baseline,
            std="none" if self.whitens else required(self.config.advantage_std, "algorithm.advantage_std"),
            eps=self.config.advantage_eps or 0.0,
            over=self.config.advantage_std_over,
            singleton=self.singleton,
        )

    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets each token's advantage to that of its response or turn.

        With KL in the reward, the coefficient times the KL of this and all later tokens is subtracted. This KL is
        estimated at the sampler's log-probabilities. `overlong.mask_truncated` narrows the mask first.
        """
        mask_R = self._narrow_mask(batch, reduce)
        advantages_R = outcome_advantages_B.double()[batch.advantage_index_R]
        if self.config.kl_in == "reward":
            advantages_R = advantages_R - reward_to_go(self._kl_charge_R(batch, reduce), batch.response_lens_B)
        if self.whitens:
            std: StdKind = required(self.config.advantage_std, "algorithm.advantage_std")
            advantages_R = whiten(
                advantages_R, self.counted_R(batch), reduce, std=std, eps=self.config.advantage_eps or 0.0
            )
        batch.advantages_R = torch.where(mask_R, advantages_R, 0.0).float()

    def _narrow_mask(self, batch: RolloutBatch, reduce: SumReduce) -> Tensor:
        """Collective over data-parallel: returns the mask after `overlong.mask_truncated`.

        Also measures the corrections of a decoupled run. Otherwise `weigh` measures them, since the current policy's
        log-probabilities are needed.
        """
        if self.config.overlong.mask_truncated:
            truncated_B = required(batch.truncated_B, "truncated_B")
            batch.response_mask_R = batch.response_mask_R & ~truncated_B[batch.sequence_R]
        if self.needs_proximal:
            self.correction.measure(batch, reduce)
        return batch.response_mask_R

    @property
    def needs_current(self) -> bool:
        """True if tokens are selected or corrected with statistics of the full minibatch at its current weights."""
        selects = self._policy_loss.token_selection is not None or self.config.top_entropy_quantile < 1
        return selects or self.correction.needs_current

    @property
    def reads_early(self) -> frozenset[str]:
        """The reference if its KL is in the reward; the proximal policy if tokens are selected or corrected."""
        selects = self.needs_current or self.correction.reads_early
        return frozenset({PROXIMAL} if selects else ()) | ({REFERENCE} if self.config.kl_in == "reward" else set())

    @property
    def _policy_loss(self) -> PolicyLoss:
        return self.own_loss or LOSSES[required(self.config.policy_loss, "algorithm.policy_loss")]

    def _denominator_R(self, batch: RolloutBatch) -> Tensor:
        """Returns the log-probabilities in the denominator of the ratio, [R]."""
        if self.needs_proximal:
            return required(batch.proximal_logprobs_R, "proximal_logprobs_R")
        return batch.rollout_logprobs_R

    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets the weights, and the tokens that the loss treats separately.

        The tokens are selected from the full minibatch, so they are the same for every split into microbatches.
        """
        if not self.needs_proximal:
            self.correction.measure(minibatch, reduce)
        super().weigh(minibatch, reduce)
        mask_R, quantile = minibatch.response_mask_R, self.config.top_entropy_quantile
        if self._policy_loss.token_selection is not None:
            old_R = self._denominator_R(minibatch)
            current_R = required(minibatch.current_logprobs_R, "current_logprobs_R")
            advantages_R = required(minibatch.advantages_R, "advantages_R")
            tokens = Tokens(*(torch.where(mask_R, each_R, 0.0) for each_R in (current_R, old_R, advantages_R)))
            uniforms_R = token_uniforms(minibatch)
            minibatch.chosen_R = self._policy_loss.choose(tokens, mask_R, uniforms_R, reduce, self.config)
        if self.config.positive_example_nll_weight > 0:
            correct_R = mask_R & required(minibatch.correct_B, "correct_B")[minibatch.sequence_R]
            num = reduce(correct_R.sum().double().reshape(1)).clamp(min=1.0)
            minibatch.nll_weights_R = (correct_R.double() / num).float()
        if quantile < 1:
            entropy_R = required(minibatch.current_entropy_R, "current_entropy_R")
            minibatch.entropic_R = highest(torch.where(mask_R, entropy_R, 0.0), mask_R, quantile, reduce)

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss sum of a microbatch, and its metrics.

        actor/loss = actor/pg_loss + kl_coef actor/kl_loss - entropy_coef actor/entropy_loss, plus the weighted
        actor/positive_nll_loss, each with the loss's own aggregation. All other metrics are means over the trained
        tokens. Untrained tokens are replaced by constants first, so that their values reach neither the loss nor a
        gradient.
        """
        config = self.config
        mask_R = microbatch.response_mask_R
        weights_R = required(microbatch.weights_R, "weights_R")
        advantages_R = required(microbatch.advantages_R, "advantages_R")
        old_R = torch.where(mask_R, self._denominator_R(microbatch), 0.0)
        logprobs_R = torch.where(mask_R, at_least_fp32(logprobs_R), old_R)
        entropy_R = torch.where(mask_R, at_least_fp32(entropy_R), 0.0)

        sequences = Sequences(mask_R, microbatch.sequence_R, microbatch.num_sequences)
        tokens = Tokens(logprobs_R, old_R, advantages_R)
        surrogate = self._policy_loss(tokens, sequences, config, microbatch.chosen_R)
        policy_loss_R = surrogate.loss_R
        if microbatch.entropic_R is not None:
            policy_loss_R = torch.where(microbatch.entropic_R, policy_loss_R, 0.0)
        metrics = _surrogate_metrics(surrogate, entropy_R, microbatch)
        corrected = self.correction.for_microbatch(microbatch, logprobs_R)
        metrics |= corrected.tally
        if corrected.weights_R is not None:
            policy_loss_R = policy_loss_R * corrected.weights_R
        if corrected.policy_R is not None:
            policy_loss_R = torch.where(corrected.policy_R, policy_loss_R, 0.0)
        if corrected.kept_R is not None:
            weights_R = torch.where(corrected.kept_R, weights_R, 0.0)

        loss = (weights_R * policy_loss_R).sum()
        metrics["actor/pg_loss"] = _sum(policy_loss_R, weights_R)
        if config.kl_in == "loss":
            ref_R = torch.where(mask_R, required(microbatch.ref_logprobs_R, "ref_logprobs_R"), old_R)
            kl_R = kl_penalty(logprobs_R, ref_R, config.kl_estimator)
            if config.kl_unbiased:
                kl_R = kl_R * log_ratio(logprobs_R, old_R).exp()
            loss = loss + config.kl_coef * (weights_R * kl_R).sum()
            metrics["actor/kl_loss"] = _sum(kl_R, weights_R)
        elif config.kl_in == "reward":
            kl_R = self._reward_kl_R(microbatch)
            metrics["actor/reward_kl_penalty"] = metric_mean(kl_R, microbatch)
            charged_R = torch.full_like(kl_R, self.kl_control.charged)
            metrics["actor/reward_kl_penalty_coeff"] = metric_mean(charged_R, microbatch)
        if microbatch.nll_weights_R is not None:
            nll_R = torch.where(microbatch.nll_weights_R > 0, -logprobs_R, 0.0)
            loss = loss + config.positive_example_nll_weight * (microbatch.nll_weights_R * nll_R).sum()
            metrics["actor/positive_nll_loss"] = _sum(nll_R, microbatch.nll_weights_R)
        if config.entropy_coef != 0 or self.entropy_control.is_adaptive:
            loss = loss - self.entropy_control.effective_coef * (weights_R * entropy_R).sum()
            metrics["actor/entropy_loss"] = _sum(entropy_R, weights_R)
        metrics["actor/loss"] = loss.detach().double()
        return loss, metrics

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics with those of the rollout correction."""
        return self.correction.finalize_metrics(metrics)

    def _kl_charge_R(self, batch: RolloutBatch, reduce: SumReduce) -> Tensor:
        """Collective over data-parallel: returns each token's KL penalty, then adapts the coefficient."""
        kl_R = self._reward_kl_R(batch)
        sums = reduce(sequence_means(kl_R, batch.response_mask_R, batch.sequence_R, batch.num_sequences))
        total, count = sums.tolist()
        return self.kl_control.charge(kl_R, total / max(count, 1.0), int(count))

    def _reward_kl_R(self, batch: RolloutBatch) -> Tensor:
        """Returns the KL of the sampling policy to the reference at each token, [R]; 0 where not trained.

        Differences within rounding give exactly 0: if all rewards are equal, whitening would scale them up to
        advantages.
        """
        rollout_R, ref_R = batch.rollout_logprobs_R, required(batch.ref_logprobs_R, "ref_logprobs_R")
        differs_R = batch.response_mask_R & ~((rollout_R - ref_R).abs() <= ROUNDING)
        rollout_R, ref_R = (torch.where(differs_R, logprobs_R, 0.0) for logprobs_R in (rollout_R, ref_R))
        return kl_penalty(rollout_R, ref_R, self.config.kl_estimator)


def _surrogate_metrics(surrogate: Surrogate, entropy_R: Tensor, microbatch: RolloutBatch) -> dict[str, Tensor]:
    """Returns the metrics of the policy loss."""
    mask_R = microbatch.response_mask_R
    return {
        "actor/pg_clipfrac": metric_mean(surrogate.clipped_R, microbatch),
        "actor/pg_clipfrac_lower": metric_mean(surrogate.clipped_lower_R, microbatch),
        "actor/ppo_kl": metric_mean(-surrogate.log_ratio_R, microbatch),
        "actor/entropy": metric_mean(entropy_R, microbatch),
        "actor/ratio_mean": metric_mean(surrogate.ratio_R, microbatch),
        "actor/ratio_max": _max_ratio(surrogate.ratio_R, mask_R),
        "actor/ratio_min": _min_ratio(surrogate.ratio_R, mask_R),
    }


def token_uniforms(batch: RolloutBatch) -> Tensor:
    """Returns one random number in [0, 1) per response token, fp64 [R], keyed by prompt, sample and position."""
    samples = zip(batch.group_id_B.tolist(), required(batch.sample_index_B, "sample_index_B").tolist(), strict=True)
    keys_B = torch.tensor([stream_key(CHOICE_SEED, uid, sample) for uid, sample in samples], dtype=torch.int64)
    lens_B, sequence_R = batch.response_lens_B, batch.sequence_R
    positions_R = torch.arange(sequence_R.numel()) - (lens_B.cumsum(0) - lens_B)[sequence_R]
    return uniforms(keys_B[sequence_R], positions_R)


def _sum(values_R: Tensor, weights_R: Tensor) -> Tensor:
    """Returns the weighted sum in fp64, detached; it does not depend on how the minibatch was split."""
    return (weights_R.double() * values_R.detach().double()).sum()


def metric_mean(values_R: Tensor, microbatch: RolloutBatch) -> Tensor:
    """Returns this microbatch's part of the mean over the trained tokens of the global minibatch."""
    return _sum(values_R, required(microbatch.metric_weights_R, "metric_weights_R"))


def _max_ratio(ratio_R: Tensor, mask_R: Tensor) -> Tensor:
    """Returns the largest ratio of the trained tokens; 0, below every ratio, if there are none."""
    return torch.cat([torch.where(mask_R, ratio_R, 0.0), ratio_R.new_zeros(1)]).max().double()


def _min_ratio(ratio_R: Tensor, mask_R: Tensor) -> Tensor:
    """Returns the smallest ratio of the trained tokens; exp(MAX_LOG_RATIO), above every ratio, if there are none."""
    top = math.exp(MAX_LOG_RATIO)
    return torch.cat([torch.where(mask_R, ratio_R, top), ratio_R.new_full((1,), top)]).min().double()
