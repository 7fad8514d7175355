"""Distillation loss, added to an algorithm's loss or used alone.

Divergences of full distributions are computed with the logits (`megatron/distillation_targets.py`); estimates at the
sampled token are computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mrl.algorithms._policy_gradient import PolicyGradient, metric_mean
from mrl.algorithms._rollout_correction import Corrected
from mrl.algorithms.base import LARGEST, Algorithm, required
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.kl import Estimator, kl_penalty
from mrl.algorithms.functional.losses import clipped_surrogate
from mrl.config.config import DistillationLossConfig
from mrl.types import RolloutBatch

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

NO_CORRECTION = Corrected(None, None, None, {})
DUAL_CLIP = 3.0
"""Dual-clip bound of the policy-gradient surrogate, as in verl."""


class Distillation:
    """Distillation loss of a run."""

    def __init__(self, config: DistillationLossConfig) -> None:
        """Stores the config, which `trainer/validation/distillation.py` has checked."""
        self._config = config

    def training_loss(self, task: Algorithm) -> Loss:
        """Returns the training loss: the divergence, plus the algorithm's loss if `use_task_rewards` is true.

        Args:
            task: Algorithm; with `use_task_rewards` false its loss is only measured. Tokens that its rollout correction
                rejects are left out of the divergence too. The weights of a decoupled correction multiply the policy
                gradient, as in verl.

        Returns:
            A function (logprobs_R, entropy_R, *`Comparison.num_scores` numbers per token, microbatch) -> (loss sum,
            metrics) in the format of `Algorithm.loss`. Without compared distributions the microbatch needs
            `teacher_logprobs_R`.
        """
        correction = task.correction if isinstance(task, PolicyGradient) else None

        def loss(
            logprobs_R: Tensor, entropy_R: Tensor, *scores_and_microbatch: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            *token_scores, microbatch = scores_and_microbatch
            distill_only = not self._config.use_task_rewards
            # a loss that is only measured needs no gradient
            task_inputs = (logprobs_R.detach(), entropy_R.detach()) if distill_only else (logprobs_R, entropy_R)
            total, metrics = task.checked_loss(*task_inputs, microbatch)
            corrected = NO_CORRECTION if correction is None else correction.for_microbatch(microbatch, logprobs_R)
            weights_R = corrected.weights_R if correction is not None and correction.spec.decoupled else None
            divergence, more = self._divergence_loss(logprobs_R, token_scores, microbatch, corrected.kept_R, weights_R)
            total = divergence if distill_only else total + self._config.distillation_loss_coef * divergence
            return total, metrics | more | {"actor/loss": total.detach().double()}

        return loss

    def _divergence_loss(
        self,
        logprobs_R: Tensor,
        token_scores: list[Tensor],
        microbatch: RolloutBatch,
        kept_R: Tensor | None,
        importance_R: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss sum of the accepted tokens' divergences, and metrics."""
        config, mask_R = self._config, microbatch.response_mask_R
        weights_R = required(microbatch.weights_R, "weights_R")
        weights_R = weights_R if kept_R is None else torch.where(kept_R, weights_R, 0.0)
        logprobs_R = torch.where(mask_R, at_least_fp32(logprobs_R), 0.0)
        if config.is_sampled:
            teacher_R = required(microbatch.teacher_logprobs_R, "teacher_logprobs_R")
            loss_R = kl_penalty(logprobs_R, torch.where(mask_R, teacher_R, 0.0), cast(Estimator, config.loss_mode))
        else:
            loss_R = torch.where(mask_R, token_scores[0], 0.0)
        metrics = {"distillation/abs_loss": metric_mean(loss_R.abs(), microbatch)}
        metrics |= _extremes("loss", loss_R, mask_R)
        for name, mass_R in zip(("student_mass", "teacher_mass"), token_scores[1:], strict=False):
            metrics[f"distillation/{name}"] = metric_mean(torch.where(mask_R, mass_R, 0.0), microbatch)
            metrics |= _extremes(name, mass_R, mask_R)
        if config.loss_max_clamp is not None:
            loss_R = loss_R.clamp(-config.loss_max_clamp, config.loss_max_clamp)
        if config.use_policy_gradient:
            sampled_R = microbatch.proximal_logprobs_R
            sampled_R = microbatch.rollout_logprobs_R if sampled_R is None else sampled_R
            surrogate = clipped_surrogate(
                logprobs_R,
                torch.where(mask_R, sampled_R, 0.0),
                -loss_R.detach(),
                clip_low=config.clip_ratio_low,
                clip_high=config.clip_ratio_high,
                dual_clip=DUAL_CLIP,
            )
            loss_R = surrogate.loss_R if importance_R is None else surrogate.loss_R * importance_R
            metrics["distillation/pg_clipfrac"] = metric_mean(surrogate.clipped_R, microbatch)
            metrics["distillation/pg_clipfrac_lower"] = metric_mean(surrogate.clipped_lower_R, microbatch)
            metrics["distillation/ppo_kl"] = metric_mean(-surrogate.log_ratio_R, microbatch)
        divergence = (weights_R * loss_R).sum()
        metrics["distillation/loss"] = (weights_R.double() * loss_R.detach().double()).sum()
        return divergence, metrics


def _extremes(name: str, values_R: Tensor, mask_R: Tensor) -> dict[str, Tensor]:
    """Returns the largest and smallest value of the trained tokens; -LARGEST and LARGEST if there are none."""
    found, beyond = values_R.detach().double(), values_R.new_full((1,), LARGEST).double()
    return {
        f"distillation/{name}_max": torch.cat([torch.where(mask_R, found, -LARGEST), -beyond]).max(),
        f"distillation/{name}_min": torch.cat([torch.where(mask_R, found, LARGEST), beyond]).min(),
    }
