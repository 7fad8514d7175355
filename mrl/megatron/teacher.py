"""Teachers on this rank: what they make of the student's samples.

Owns the two kinds of them: a further set of weights for the student's own modules, and a model of its own, which is
only run forward and waits in host memory between its turns. All ranks call each method together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.config.config import Config
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Policy
from mrl.megatron.forward_only import Frozen
from mrl.megatron.trainable import Trainable
from mrl.models.base import ArchSpec
from mrl.types import RolloutBatch


class Teacher(ABC):
    """Scores what the student sampled, under the contract that it was sampled by.

    Attributes:
        model: Whose layout its tensors have.
        arch: Its structure.
    """

    model: Trainable
    arch: ArchSpec

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights on this rank, by their names in the model's layout; to be filled."""

    @abstractmethod
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: of every response token, fp32 [R] on the CPU, as `Policy.score`."""

    @abstractmethod
    def states(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: final hidden states [R, H], as `Trainable.states`."""


class Lodger(Teacher):
    """With the student's layers: it is swapped into the student's modules, like the reference."""

    def __init__(self, policy: Policy, arch: ArchSpec) -> None:
        """Args: policy: The student. arch: Of both."""
        self.model, self.arch = policy, arch
        self._policy, self._tensors = policy, policy.weight_set()

    def tensors(self) -> Mapping[str, Tensor]:
        """See `Teacher`."""
        return self._tensors

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """See `Teacher`."""
        with self._policy.holding(self._tensors):
            return self._policy.score(batch)[0]

    def states(self, batch: RolloutBatch) -> Tensor:
        """See `Teacher`."""
        with self._policy.holding(self._tensors):
            return self._policy.states(batch)


class Guest(Teacher):
    """With layers of its own, in the student's layout; the student makes room for its turns."""

    def __init__(
        self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device, policy: Policy
    ) -> None:
        """Collective over the job: builds the model, without weights.

        Args:
            config: The teacher's, see `trainer/validation/frozen_models.py: guest_config`.
            arch: The teacher.
            groups: Who sits where.
            device: Of this rank.
            policy: The student.
        """
        self._forward, self._config, self._policy = Frozen(config, arch, groups, device), config, policy
        self.model, self.arch = self._forward, arch
        self._forward.offload()

    def tensors(self) -> Mapping[str, Tensor]:
        """See `Teacher`."""
        return self._forward.named_tensors()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """See `Teacher`."""
        self._policy.offload()
        found = self._forward.logprobs(batch, self._config)
        self._forward.offload()
        return found

    def states(self, batch: RolloutBatch) -> Tensor:
        """See `Teacher`."""
        self._policy.offload()
        found = self._forward.states(batch)
        self._forward.offload()
        return found
