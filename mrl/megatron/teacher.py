"""Teachers on this rank, which score the student's samples.

A teacher with the student's architecture is a second set of weights for the student's modules. Any other is a separate
model that is only run forward and is offloaded to host memory in between. All ranks call each method together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.config.config import Config
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Actor
from mrl.megatron.forward_only_model import ForwardOnlyModel
from mrl.megatron.trainable_model import TrainableModel
from mrl.models.base import ArchSpec
from mrl.types import RolloutBatch


class Teacher(ABC):
    """Base class of teachers, which score samples under the distribution from which the student sampled.

    Attributes:
        model: Model whose layout describes the teacher's tensors.
        arch: Architecture of the teacher.
    """

    model: TrainableModel
    arch: ArchSpec

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the teacher's weights on this rank by their names in the model's layout, to be filled."""

    @abstractmethod
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: returns the log-probability of every response token, fp32 [R] on the CPU."""

    @abstractmethod
    def final_hidden_states(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: returns the final hidden states [R, H], see `TrainableModel.final_hidden_states`."""


class SharedWeightTeacher(Teacher):
    """Teacher with the student's architecture, whose weights are swapped into the student's modules."""

    def __init__(self, student: Actor, arch: ArchSpec) -> None:
        """Allocates the weights.

        Args:
            student: Student.
            arch: Architecture of student and teacher.
        """
        self.model, self.arch = student, arch
        self._student, self._tensors = student, student.empty_weights()

    def tensors(self) -> Mapping[str, Tensor]:
        """Implements `Teacher.tensors`."""
        return self._tensors

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.logprobs`."""
        with self._student.using_weights(self._tensors):
            return self._student.score(batch)[0]

    def final_hidden_states(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.final_hidden_states`."""
        with self._student.using_weights(self._tensors):
            return self._student.final_hidden_states(batch)


class BaseTeacher(Teacher):
    """The student without its low-rank adapters, as a teacher; needs no layers of its own."""

    def __init__(self, student: Actor, arch: ArchSpec) -> None:
        """Stores the student, which has adapters, and its architecture."""
        self.model, self.arch, self._student = student, arch, student

    def tensors(self) -> Mapping[str, Tensor]:
        """Implements `Teacher.tensors`: the student's own weights, which must not be filled."""
        return self._student.named_tensors()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.logprobs`."""
        with self._student.without_adapters():
            return self._student.score(batch)[0]

    def final_hidden_states(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.final_hidden_states`."""
        with self._student.without_adapters():
            return self._student.final_hidden_states(batch)


class SeparateTeacher(Teacher):
    """Teacher with its own layers, in the student's parallel layout; the student is offloaded while it runs."""

    def __init__(
        self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device, student: Actor
    ) -> None:
        """Collective over the job: builds the model, without weights, and offloads it.

        Args:
            config: Config of the teacher, see `forward_only_config` of `trainer/validation/forward_only.py`.
            arch: Architecture of the teacher.
            groups: Process groups of the layout.
            device: Device of this rank.
            student: Student.
        """
        self._forward, self._config, self._student = ForwardOnlyModel(config, arch, groups, device), config, student
        self.model, self.arch = self._forward, arch
        self._forward.offload()

    def tensors(self) -> Mapping[str, Tensor]:
        """Implements `Teacher.tensors`."""
        return self._forward.named_tensors()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.logprobs`; offloads the student, then itself."""
        self._student.offload()
        found = self._forward.logprobs(batch, self._config)
        self._forward.offload()
        return found

    def final_hidden_states(self, batch: RolloutBatch) -> Tensor:
        """Implements `Teacher.final_hidden_states`; offloads the student, then itself."""
        self._student.offload()
        found = self._forward.final_hidden_states(batch)
        self._forward.offload()
        return found
