"""The actor's weights, from and to Hugging Face folders, on the ranks that train.

Owns where the first weights and the reference's come from, and what a folder with the actor's has beside its tensors.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.distributed.collectives import together
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Policy
from mrl.megatron.param_broadcast import first_here, share
from mrl.megatron.trainable import Trainable
from mrl.models.base import ArchSpec
from mrl.models.presets import initializer_range
from mrl.resharding.init import random_init
from mrl.resharding.weight_sync import gather_layouts
from mrl.trainer.hf_export import export_to_hf, write_model_folder
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.resolve import Plan


def read_weights(model: Trainable, arch: ArchSpec, folder: str, tensors: Mapping[str, Tensor]) -> None:
    """Collective over the job: of the ranks that hold the same parameter one reads it.

    Args:
        model: Whose layout the tensors have.
        arch: Its structure.
        folder: Of Hugging Face.
        tensors: Its own, or another set of weights.
    """
    layout, mine = model.layout(), first_here(model.chunks)
    with together():
        load_from_hf(
            folder,
            arch,
            {name: stored for name, stored in layout.items() if name in mine},
            {name: tensor for name, tensor in tensors.items() if name in mine},
        )
    share(model.chunks, tensors, model.device)


class ActorWeights:
    """Of one run; every rank holds one and calls each method together with all of the job."""

    def __init__(self, plan: Plan, policy: Policy | None, groups: ProcessGroups) -> None:
        """Args: plan: The run's. policy: Of this rank; None: it does not train. groups: Who sits where."""
        self._plan, self._actor, self._groups = plan, policy, groups

    @property
    def _policy(self) -> Policy:
        if self._actor is None:
            raise RuntimeError(f"rank {self._groups.rank} only samples: it has no actor")
        return self._actor

    def load_initial(self) -> None:
        """Collective over the job: fills the actor from the model folder, or at random."""
        config, arch = self._plan.config, self._plan.arch
        with on_trainers(self._groups) as here:
            if not here:
                return
            tensors = self._policy.named_tensors()
            if config.model.path is not None:
                self._read(config.model.path, tensors)
            else:
                layout, deviation = self._policy.layout(), initializer_range(config.model.overrides)
                with together():
                    random_init(arch, layout, tensors, config.run.seed, deviation)
            self._policy.weights_changed()

    def load_reference(self, path: str) -> None:
        """Collective over the job: fills the reference's tensors from a Hugging Face folder."""
        with on_trainers(self._groups) as here:
            if here:
                self._read(path, self._policy.reference_tensors())
                self._policy.compare_reference()

    def take_reference(self) -> None:
        """Collective over the job: fills the reference's tensors from the actor of now."""
        with on_trainers(self._groups) as here:
            if here:
                self._policy.take_reference()

    def _read(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        read_weights(self._policy, self._plan.arch, folder, tensors)

    def export(self, folder: Path) -> None:
        """Collective over the job: the actor as a Hugging Face folder; a rank of each host writes."""
        with on_trainers(self._groups) as here:
            if not here:
                return
            layouts, model = gather_layouts(self._policy.layout()), self._plan.config.model
            tensors = self._policy.named_tensors()
            hosts = [""] * dist.get_world_size()
            dist.all_gather_object(hosts, socket.gethostname())
            writers = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
            export_to_hf(folder, self._plan.arch, layouts, tensors, dtype=model.dtype, like=model.path, writers=writers)
            with together():
                if self._groups.rank == 0:
                    self._plan.tokenizer.save(folder)

    def model_folder(self, further: Mapping[str, Any]) -> Path:
        """Collective over the ranks that sample: config.json, with further keys, and tokenizer, in the run folder."""
        plan, model = self._plan, self._plan.config.model
        folder, dtype = plan.run.root / "model", plan.config.rollout.dtype or model.dtype
        with together(self._groups.samplers):
            if self._groups.rank == self._groups.grid.samplers.start:
                write_model_folder(folder, plan.arch, dtype, plan.tokenizer, like=model.path, further=further)
        return folder
