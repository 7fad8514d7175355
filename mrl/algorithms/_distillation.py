"""The distillation's part of what the actor minimises, beside an algorithm's loss or in its place.

Owns how a token's divergence from its teacher becomes a loss and metrics. Divergences of whole distributions come from
where logits are made (`megatron/distillation_targets.py`); estimates at the sampled token are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mrl.algorithms._policy_gradient import PolicyGradient
from mrl.algorithms._rollout_correction import Corrected
from mrl.algorithms.base import LARGEST, Algorithm, required
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.kl import Estimator, kl_penalty
from mrl.algorithms.functional.losses import clipped_surrogate
from mrl.config.config import DistillationLossConfig
from mrl.types import RolloutBatch

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

NOTHING = Corrected(None, None, None, {})
DUAL_CLIP = 3.0
"""Of the policy gradient's surrogate; verl's."""


class Distillation:
    """Of one run."""

    def __init__(self, config: DistillationLossConfig) -> None:
        """Args: config: Checked by `trainer/validation/distillation.py`."""
        self._config = config

    def beside(self, task: Algorithm) -> Loss:
        """The loss that is minimised.

        Args:
            task: Its loss is only measured where `use_task_rewards` is false. What its rollout correction rejects
                leaves the divergence too; the weights of a decoupled one multiply the policy gradient, as in verl.

        Returns:
            (logprobs_R, entropy_R, *`Comparison.num_scores` numbers of each token, microbatch) -> loss sum and metrics,
            as `Algorithm.loss`; the microbatch has `teacher_logprobs_R` where nothing is compared.
        """
        correction = task.correction if isinstance(task, PolicyGradient) else None

        def loss(logprobs_R: Tensor, entropy_R: Tensor, *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
            *compared, microbatch = rest
            alone = not self._config.use_task_rewards
            # what is measured alone gets no gradient
            of_task = (logprobs_R.detach(), entropy_R.detach()) if alone else (logprobs_R, entropy_R)
            total, metrics = task.checked_loss(*of_task, microbatch)
            corrected = NOTHING if correction is None else correction.of(microbatch, logprobs_R)
            weights_R = corrected.weights_R if correction is not None and correction.spec.decoupled else None
            drawn, more = self._drawn(logprobs_R, compared, microbatch, corrected.kept_R, weights_R)
            total = drawn if alone else total + self._config.distillation_loss_coef * drawn
            return total, metrics | more | {"actor/loss": total.detach().double()}

        return loss

    def _drawn(
        self,
        logprobs_R: Tensor,
        compared: list[Tensor],
        microbatch: RolloutBatch,
        kept_R: Tensor | None,
        importance_R: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum of the tokens' divergences, of those that are kept, and metrics."""
        config, mask_R = self._config, microbatch.response_mask_R
        weights_R = required(microbatch.weights_R, "weights_R")
        weights_R = weights_R if kept_R is None else torch.where(kept_R, weights_R, 0.0)
        logprobs_R = torch.where(mask_R, at_least_fp32(logprobs_R), 0.0)
        if config.is_sampled:
            teacher_R = required(microbatch.teacher_logprobs_R, "teacher_logprobs_R")
            loss_R = kl_penalty(logprobs_R, torch.where(mask_R, teacher_R, 0.0), cast(Estimator, config.loss_mode))
        else:
            loss_R = torch.where(mask_R, compared[0], 0.0)
        metrics = {"distillation/abs_loss": _mean(loss_R.abs(), microbatch)}
        metrics |= _extremes("loss", loss_R, mask_R)
        for name, mass_R in zip(("student_mass", "teacher_mass"), compared[1:], strict=False):
            metrics[f"distillation/{name}"] = _mean(torch.where(mask_R, mass_R, 0.0), microbatch)
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
            metrics["distillation/pg_clipfrac"] = _mean(surrogate.clipped_R, microbatch)
            metrics["distillation/pg_clipfrac_lower"] = _mean(surrogate.clipped_lower_R, microbatch)
            metrics["distillation/ppo_kl"] = _mean(-surrogate.log_ratio_R, microbatch)
        drawn = (weights_R * loss_R).sum()
        metrics["distillation/loss"] = (weights_R.double() * loss_R.detach().double()).sum()
        return drawn, metrics


def _mean(values_R: Tensor, microbatch: RolloutBatch) -> Tensor:
    """This microbatch's part of the mean over the trained tokens of the global minibatch."""
    weights_R = required(microbatch.metric_weights_R, "metric_weights_R")
    return (weights_R.double() * values_R.detach().double()).sum()


def _extremes(name: str, values_R: Tensor, mask_R: Tensor) -> dict[str, Tensor]:
    """Over the trained tokens; beyond every number where there are none."""
    found, beyond = values_R.detach().double(), values_R.new_full((1,), LARGEST).double()
    return {
        f"distillation/{name}_max": torch.cat([torch.where(mask_R, found, -LARGEST), -beyond]).max(),
        f"distillation/{name}_min": torch.cat([torch.where(mask_R, found, LARGEST), beyond]).min(),
    }
