"""A model on this rank that is only run forward: a teacher with its own layers, or a reward model.

All ranks call each method together.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from mrl.algorithms.functional.logprobs import Distribution
from mrl.config.config import Config
from mrl.megatron.actor import sampled_distribution
from mrl.megatron.trainable_model import TrainableModel
from mrl.types import RolloutBatch

_NO_DISTRIBUTION = Distribution(1.0, 1)
"""Unused distribution: a value belongs to a state, no token is scored."""


class ForwardOnlyModel(TrainableModel):
    """A model that is never trained."""

    section: ClassVar[str] = "frozen"
    loss_metric: ClassVar[str] = "frozen/loss"
    trained: ClassVar[bool] = False

    def logprobs(self, batch: RolloutBatch, config: Config) -> Tensor:
        """Collective over the job: returns the log-probability of every response token, see `Policy.score`."""
        return self._score(batch, sampled_distribution(config), 2)[0]

    def values(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: returns the value head's output before every response token, fp32 [R] on the CPU."""
        return self._score(batch, _NO_DISTRIBUTION, 1)[0]
