"""SFT: negative log-likelihood of the response tokens.

It uses no reward, ratio or reference: `rollout_logprobs_R` is ignored.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.algorithms.base import Algorithm, Outcomes, SumReduce, required
from mrl.algorithms.functional.importance import at_least_fp32
from mrl.types import RolloutBatch


class Sft(Algorithm):
    """Loss -log pi(response | prompt)."""

    learns_from = "responses"
    defaults: ClassVar[dict[str, Any]] = {"loss_aggregation": "token_mean"}
    unused = frozenset(
        {
            "advantage_std",
            "advantage_eps",
            "advantage_std_over",
            "singleton_group",
            "policy_loss",
            "clip_low",
            "clip_high",
            "dual_clip",
            "kl_in",
            "entropy_coef",
            "rollout_correction",
            "entropy_ctrl",
            "positive_example_nll_weight",
            "top_entropy_quantile",
            "dynamic_sampling",
            "overlong",
        }
    )

    def shape_rewards(self, outcomes: Outcomes) -> Tensor:
        """Returns the rewards unchanged; they are not used."""
        return outcomes.rewards_N.double()

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns 1 for each sample: the likelihood is the policy gradient with an advantage of 1."""
        return torch.ones_like(outcomes.rewards_N, dtype=torch.float64)

    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Sets 1 at every trained token; no collective is needed."""
        batch.advantages_R = batch.response_mask_R.float()

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weighted negative log-likelihood, and metrics (means over the trained tokens)."""
        mask_R = microbatch.response_mask_R
        nll_R = torch.where(mask_R, -at_least_fp32(logprobs_R), 0.0)
        loss = (required(microbatch.weights_R, "weights_R") * nll_R).sum()
        metric_weights_R = required(microbatch.metric_weights_R, "metric_weights_R").double()
        entropy_R = torch.where(mask_R, entropy_R.detach().double(), 0.0)
        return loss, {
            "actor/loss": loss.detach().double(),
            "actor/nll": (metric_weights_R * nll_R.detach().double()).sum(),
            "actor/entropy": (metric_weights_R * entropy_R).sum(),
        }


ALGORITHM = Sft
