"""Distillation teachers of a run: weights, assignment of prompts to teachers, scoring of a step's samples.

Teachers never change, so checkpoints do not contain them. A teacher with the student's architecture shares the
student's modules; any other is a separate model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from mrl.algorithms.base import required
from mrl.checkpoint.formats.hf import HfSource
from mrl.config.config import TeacherConfig
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Actor
from mrl.megatron.distillation_targets import DistillationSpec
from mrl.megatron.teacher import BaseTeacher, SeparateTeacher, SharedWeightTeacher, Teacher
from mrl.models.base import ArchSpec
from mrl.models.presets import initializer_range
from mrl.resharding.dtypes import allocate
from mrl.resharding.megatron import OUTPUT, output_name, output_rows
from mrl.resharding.random_init import random_init
from mrl.trainer.actor_weights import read_weights
from mrl.trainer.run_plan import RunPlan
from mrl.trainer.validation.distillation import is_frozen_actor, teacher_index
from mrl.trainer.validation.forward_only import forward_only_config
from mrl.types import Prompt, RolloutBatch


class RunTeachers:
    """Teachers of the run; methods are collective over the ranks that train unless they say otherwise."""

    def __init__(self, plan: RunPlan, groups: ProcessGroups, device: torch.device, actor: Actor) -> None:
        """Collective over the ranks that train: builds the teachers without weights.

        Args:
            plan: Resolved and validated config.
            groups: Process groups and coordinates of this rank.
            device: Device of this rank.
            actor: Student (the actor).
        """
        self._config, self._actor = plan.config, actor
        self._configs = plan.config.distillation.teacher_models
        self._teachers = [
            self._create(plan, config, arch, groups, device)
            for config, arch in zip(self._configs, plan.teachers, strict=True)
        ]
        actor.offload()  # before the engine measures the free memory
        self._is_last_stage = groups.coords.pp == groups.grid.pp - 1
        self._teacher_of: dict[int, int] = {}

    def _create(
        self, plan: RunPlan, config: TeacherConfig, arch: ArchSpec, groups: ProcessGroups, device: torch.device
    ) -> Teacher:
        actor = self._actor
        if is_frozen_actor(plan.config, config):
            return BaseTeacher(actor, arch)
        if arch == plan.arch:
            return SharedWeightTeacher(actor, arch)
        return SeparateTeacher(forward_only_config(plan.config), arch, groups, device, actor)

    def load(self) -> None:
        """Collective over the ranks that train: reads the teachers' weights; presets get random weights."""
        for index, (teacher, config) in enumerate(zip(self._teachers, self._configs, strict=True)):
            if isinstance(teacher, BaseTeacher):
                continue
            if config.model_path is not None:
                read_weights(teacher.model, teacher.arch, config.model_path, teacher.tensors())
            else:
                seed, deviation = self._config.run.seed + 1 + index, initializer_range(config.overrides)
                with raise_on_all_ranks():
                    random_init(teacher.arch, teacher.model.layout(), teacher.tensors(), seed, deviation)
        distilled = self._config.distillation
        if not distilled.distillation_loss.is_sampled:
            weights = []
            for teacher, config in zip(self._teachers, self._configs, strict=True):
                with raise_on_all_ranks():
                    if self._is_last_stage:
                        weights.append(self._output_weight(teacher, config.model_path))
            rollout, actor = self._config.rollout, self._config.actor
            self._actor.distillation = DistillationSpec(
                distilled.distillation_loss, rollout.temperature, actor.logprob_chunk_tokens, weights
            )
        for teacher in self._teachers:
            if isinstance(teacher, SeparateTeacher):
                teacher.model.offload()

    def route(self, prompts: Sequence[Prompt]) -> None:
        """Assigns the prompts of the step to teachers; `prompts` must be the same on every rank."""
        self._teacher_of |= {prompt.uid: teacher_index(self._config.distillation, prompt) for prompt in prompts}

    def score(self, batch: RolloutBatch) -> None:
        """Collective over the ranks that train: sets `teacher_B`, and `teacher_logprobs_R` or `teacher_states_R`.

        Args:
            batch: Samples of the prompts given to `route`.
        """
        used = sorted(set(self._teacher_of.values()))
        batch.teacher_B = torch.tensor([self._teacher_of[uid] for uid in batch.group_id_B.tolist()], dtype=torch.int64)
        self._teacher_of = {}
        batch.teacher_logprobs_R = batch.teacher_states_R = None
        parts = {}
        for index in used:
            teacher, own_B = self._teachers[index], batch.teacher_B == index
            part = batch.select(own_B.nonzero().flatten().tolist())
            sampled = self._config.distillation.distillation_loss.is_sampled
            parts[index] = teacher.logprobs(part) if sampled else teacher.final_hidden_states(part)
        if self._config.distillation.distillation_loss.is_sampled:
            batch.teacher_logprobs_R = joined(batch, parts)
        else:
            batch.teacher_states_R = joined(batch, parts)

    def _output_weight(self, teacher: Teacher, folder: str | None) -> Tensor:
        """Returns a teacher's output weight for this rank's shard of the student's vocabulary."""
        if isinstance(teacher, SharedWeightTeacher) or folder is None:
            tensors = teacher.tensors()
            name = output_name(tensors)
            return tensors[name].clone() if folder is None else tensors[name]
        own = self._actor.layout()
        stored = output_rows(own[output_name(own)], teacher.arch)
        found = allocate({OUTPUT: stored})
        with closing(HfSource(folder, teacher.arch)) as weights:
            weights.fill({OUTPUT: stored}, found)
        return found[OUTPUT]


def joined(batch: RolloutBatch, parts: dict[int, Tensor]) -> Tensor:
    """Merges the results of all teachers into the batch's order; narrower rows are padded with zeros."""
    teacher_R = required(batch.teacher_B, "teacher_B")[batch.sequence_R]
    widest = max(parts.values(), key=lambda part: math.prod(part.shape[1:]))
    joined = torch.zeros(teacher_R.numel(), *widest.shape[1:], dtype=widest.dtype)
    for index, part in parts.items():
        rows = (teacher_R == index).nonzero().squeeze(1)
        target = joined if part.dim() == 1 else joined[:, : part.size(1)]
        target[rows] = part
    return joined
