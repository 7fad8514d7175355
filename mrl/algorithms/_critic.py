"""The critic's training objective: value loss and metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.base import SumReduce, required
from mrl.algorithms.functional.aggregation import token_weights
from mrl.algorithms.functional.gae import value_loss
from mrl.config.config import CriticConfig, RolloutConfig
from mrl.types import RolloutBatch


class ValueObjective:
    """Value loss of a critic, stateless; call `weigh` on a minibatch before `loss` on its microbatches."""

    def __init__(self, config: CriticConfig, rollout: RolloutConfig) -> None:
        """Stores the settings.

        Args:
            config: Config section of the critic.
            rollout: Config section with the longest response length.
        """
        self._config, self._rollout = config, rollout

    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets the token weights by `critic.loss_aggregation`."""
        minibatch.weights_R, minibatch.metric_weights_R = token_weights(
            minibatch.valued_R,
            minibatch.sequence_R,
            minibatch.num_sequences,
            self._config.loss_aggregation,
            reduce,
            norm_length=self._rollout.response_length,
        )

    def loss(self, values_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss sum of a microbatch, and its metrics, in the format of `Algorithm.loss`.

        Args:
            values_R: Values by the current critic, fp32, with gradient.
            microbatch: Sequences with `values_R` (old values), `returns_R` and weights set.
        """
        mask_R = microbatch.valued_R
        weights_R = required(microbatch.weights_R, "weights_R")
        old_R = required(microbatch.values_R, "values_R")
        values_R = torch.where(mask_R, values_R, old_R)
        value_losses = value_loss(
            values_R, old_R, required(microbatch.returns_R, "returns_R"), clip=self._config.cliprange_value
        )
        loss_R = torch.where(mask_R, value_losses.loss_R, 0.0)
        means_R = required(microbatch.metric_weights_R, "metric_weights_R").double()
        return (weights_R * loss_R).sum(), {
            "critic/vf_loss": (weights_R.double() * loss_R.detach().double()).sum(),
            "critic/vf_clipfrac": (means_R * value_losses.clipped_R.double()).sum(),
            "critic/vpred_mean": (means_R * values_R.detach().double()).sum(),
        }
