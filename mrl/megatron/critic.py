"""The critic on this rank: values of the states in which tokens were sampled, and steps on their loss.

Owns nothing but what a critic scores: chunks, optimizer and layouts are `Trainable`'s. All ranks call each method
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mrl.algorithms.functional.logprobs import Distribution
from mrl.megatron.forward_backward import Loss
from mrl.megatron.trainable import Trainable
from mrl.resharding.megatron import OUTPUT
from mrl.types import RolloutBatch

_NOTHING = Distribution(1.0, 1)
"""A value is of a state: no token is scored."""


class Critic(Trainable):
    """A value of each response token's state, that is of everything before the token."""

    section: ClassVar[str] = "critic"
    loss_metric: ClassVar[str] = "critic/vf_loss"

    def take(self, actor: Mapping[str, Tensor]) -> None:
        """Becomes the actor's layers under a head of zeros, which values every state 0.

        Args:
            actor: `Policy.named_tensors` of an actor with the same layers.
        """
        with torch.no_grad():
            for name, tensor in self.named_tensors().items():
                if name.endswith(OUTPUT):
                    tensor.zero_()
                else:
                    tensor.copy_(actor[name])
        self.weights_changed()

    def values(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: the value before every response token, fp32 [R] on the CPU, no gradient.

        Args:
            batch: This data-parallel index's sequences, the same on its tp and pp ranks; maybe none.
        """
        return self._scored(batch, _NOTHING, 1)[0]

    def update(self, minibatch: RolloutBatch, loss: Loss) -> dict[str, float]:
        """Collective over the job: one optimizer step on a minibatch.

        Args:
            minibatch: This data-parallel index's part; maybe none.
            loss: (values_R, microbatch) -> loss sum and metrics.

        Returns:
            The loss's metrics over the global minibatch, critic/grad_norm (before clipping) and critic/lr, the same on
            all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        return self._step(minibatch, _NOTHING, loss)
