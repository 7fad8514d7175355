"""What a critic minimises: the value loss of its minibatches, and its metrics.

Owns the assembly of `algorithms/functional/gae.py` into one loss, as `Algorithm` does for the policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.base import SumReduce, required
from mrl.algorithms.functional.aggregation import token_weights
from mrl.algorithms.functional.gae import value_loss
from mrl.config.config import CriticConfig, RolloutConfig
from mrl.types import RolloutBatch


class ValueObjective:
    """Holds no state between steps; `weigh` comes before `loss`."""

    def __init__(self, config: CriticConfig, rollout: RolloutConfig) -> None:
        """Args: config: Of the critic. rollout: Knows the longest response."""
        self._config, self._rollout = config, rollout

    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets the weights of the tokens by `critic.loss_aggregation`."""
        minibatch.weights_R, minibatch.metric_weights_R = token_weights(
            minibatch.valued_R,
            minibatch.sequence_R,
            minibatch.num_sequences,
            self._config.loss_aggregation,
            reduce,
            norm_length=self._rollout.response_length,
        )

    def loss(self, values_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum of a microbatch, and metrics, as `Algorithm.loss`.

        Args:
            values_R: Of the critic as it is, fp32, requires grad.
            microbatch: `values_R`, `returns_R` and the weights set.
        """
        mask_R = microbatch.valued_R
        weights_R = required(microbatch.weights_R, "weights_R")
        old_R = required(microbatch.values_R, "values_R")
        values_R = torch.where(mask_R, values_R, old_R)
        found = value_loss(
            values_R, old_R, required(microbatch.returns_R, "returns_R"), clip=self._config.cliprange_value
        )
        loss_R = torch.where(mask_R, found.loss_R, 0.0)
        means_R = required(microbatch.metric_weights_R, "metric_weights_R").double()
        return (weights_R * loss_R).sum(), {
            "critic/vf_loss": (weights_R.double() * loss_R.detach().double()).sum(),
            "critic/vf_clipfrac": (means_R * found.clipped_R.double()).sum(),
            "critic/vpred_mean": (means_R * values_R.detach().double()).sum(),
        }
