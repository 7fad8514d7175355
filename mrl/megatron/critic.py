"""The critic on this rank: values of response tokens, and updates on the value loss.

All ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mrl.algorithms.functional.logprobs import Distribution
from mrl.megatron.forward_backward import Loss
from mrl.megatron.trainable_model import TrainableModel
from mrl.resharding.megatron import OUTPUT
from mrl.types import RolloutBatch

_NO_DISTRIBUTION = Distribution(1.0, 1)
"""Unused distribution: a value belongs to a state, no token is scored."""


class Critic(TrainableModel):
    """Critic: predicts a value for each response token from the tokens before it."""

    section: ClassVar[str] = "critic"
    loss_metric: ClassVar[str] = "critic/vf_loss"
    skipped_metric: ClassVar[str] = "critic/update_skipped"

    def init_from_actor(self, actor: Mapping[str, Tensor]) -> None:
        """Copies the actor's layers and sets the value head to zero, so that every value is 0.

        Args:
            actor: Tensors of an actor with the same layers, from `named_tensors`.
        """
        with torch.no_grad():
            for name, tensor in self.named_tensors().items():
                if name.endswith(OUTPUT):
                    tensor.zero_()
                else:
                    tensor.copy_(actor[name])
        self.weights_changed()

    def zero_head(self) -> None:
        """Sets the value head to zero, so that every value is 0."""
        with torch.no_grad():
            for name, tensor in self.named_tensors().items():
                if name.endswith(OUTPUT):
                    tensor.zero_()

    def values(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: returns the value before every response token, fp32 [R] on the CPU, no gradient.

        Args:
            batch: Sequences of this data-parallel index, the same on its tp and pp ranks; may be empty.
        """
        return self._score(batch, _NO_DISTRIBUTION, 1)[0]

    def update(self, minibatch: RolloutBatch, loss: Loss) -> dict[str, float]:
        """Collective over the job: takes one optimizer step on a minibatch.

        Args:
            minibatch: Part of this data-parallel index; may be empty.
            loss: Function (values_R, microbatch) -> (loss sum, metrics).

        Returns:
            The loss's metrics over the global minibatch, critic/grad_norm (before clipping) and critic/lr, the same on
            all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        return self._step(minibatch, _NO_DISTRIBUTION, loss)
