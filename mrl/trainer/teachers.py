"""The teachers in the run: their weights, which prompt is whose, and their turns on the step's samples.

Owns what a step's batch gets from them. They are files and stay as they are: a commit holds nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from mrl.algorithms.base import required
from mrl.checkpoint.formats.hf import HfSource
from mrl.distributed.collectives import together
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Policy
from mrl.megatron.distillation_targets import Comparison
from mrl.megatron.teacher import Guest, Lodger, Teacher
from mrl.models.presets import initializer_range
from mrl.resharding.dtypes import allocate
from mrl.resharding.init import random_init
from mrl.resharding.megatron import OUTPUT, output_name, output_rows
from mrl.trainer.actor_weights import read_weights
from mrl.trainer.resolve import Plan
from mrl.trainer.validation.distillation import teacher_of
from mrl.trainer.validation.frozen_models import guest_config
from mrl.types import Prompt, RolloutBatch


class RunTeachers:
    """Of one run; every rank holds one and calls each method together with all of the job."""

    def __init__(self, plan: Plan, groups: ProcessGroups, device: torch.device, policy: Policy) -> None:
        """Collective over the job: room for their weights.

        Args:
            plan: The run's.
            groups: Who sits where.
            device: Of this rank.
            policy: The student.
        """
        self._config, self._policy = plan.config, policy
        self._named = plan.config.distillation.teacher_models
        self._teachers: list[Teacher] = [
            Lodger(policy, arch)
            if arch == plan.arch
            else Guest(guest_config(plan.config), arch, groups, device, policy)
            for arch in plan.teachers
        ]
        policy.offload()  # before the engine reads how much memory is free
        self._is_last_stage = groups.coords.pp == groups.grid.pp - 1
        self._teacher_of: dict[int, int] = {}

    def load(self) -> None:
        """Collective over the job: reads their weights from their folders; presets' are random."""
        for index, (teacher, named) in enumerate(zip(self._teachers, self._named, strict=True)):
            if named.model_path is not None:
                read_weights(teacher.model, teacher.arch, named.model_path, teacher.tensors())
            else:
                seed, deviation = self._config.run.seed + 1 + index, initializer_range(named.overrides)
                with together():
                    random_init(teacher.arch, teacher.model.layout(), teacher.tensors(), seed, deviation)
        distilled = self._config.distillation
        if not distilled.distillation_loss.is_sampled:
            weights = []
            for teacher, named in zip(self._teachers, self._named, strict=True):
                with together():
                    if self._is_last_stage:
                        weights.append(self._output_weight(teacher, named.model_path))
            rollout, actor = self._config.rollout, self._config.actor
            self._policy.comparison = Comparison(
                distilled.distillation_loss, rollout.temperature, actor.logprob_chunk_tokens, weights
            )
        for teacher in self._teachers:
            if isinstance(teacher, Guest):
                teacher.model.offload()

    def route(self, prompts: Sequence[Prompt]) -> None:
        """Remembers whose the prompts of this step are, the same on every rank."""
        self._teacher_of |= {prompt.uid: teacher_of(self._config.distillation, prompt) for prompt in prompts}

    def score(self, batch: RolloutBatch) -> None:
        """Collective over the job: sets `teacher_B`, and `teacher_logprobs_R` or `teacher_states_R`.

        Args:
            batch: Samples of prompts that `route` was told.
        """
        asked = sorted(set(self._teacher_of.values()))
        batch.teacher_B = torch.tensor([self._teacher_of[uid] for uid in batch.group_id_B.tolist()], dtype=torch.int64)
        self._teacher_of = {}
        batch.teacher_logprobs_R = batch.teacher_states_R = None
        parts = {}
        for index in asked:
            teacher, own_B = self._teachers[index], batch.teacher_B == index
            part = batch.select(own_B.nonzero().flatten().tolist())
            sampled = self._config.distillation.distillation_loss.is_sampled
            parts[index] = teacher.logprobs(part) if sampled else teacher.states(part)
        if self._config.distillation.distillation_loss.is_sampled:
            batch.teacher_logprobs_R = joined(batch, parts)
        else:
            batch.teacher_states_R = joined(batch, parts)

    def _output_weight(self, teacher: Teacher, folder: str | None) -> Tensor:
        """A teacher's output weight for the tokens of this rank's part of the student's vocabulary."""
        if isinstance(teacher, Lodger) or folder is None:
            tensors = teacher.tensors()
            name = output_name(tensors)
            return tensors[name].clone() if folder is None else tensors[name]
        own = self._policy.layout()
        stored = output_rows(own[output_name(own)], teacher.arch)
        found = allocate({OUTPUT: stored})
        with closing(HfSource(folder, teacher.arch)) as weights:
            weights.fill({OUTPUT: stored}, found)
        return found[OUTPUT]


def joined(batch: RolloutBatch, parts: dict[int, Tensor]) -> Tensor:
    """What the teachers gave for their sequences, in the batch's order; rows of different widths are filled up."""
    teacher_R = required(batch.teacher_B, "teacher_B")[batch.sequence_R]
    widest = max(parts.values(), key=lambda part: math.prod(part.shape[1:]))
    joined = torch.zeros(teacher_R.numel(), *widest.shape[1:], dtype=widest.dtype)
    for index, part in parts.items():
        place = (teacher_R == index).nonzero().squeeze(1)
        own = joined if part.dim() == 1 else joined[:, : part.size(1)]
        own[place] = part
    return joined
