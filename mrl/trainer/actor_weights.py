"""Loading and export of the actor's and the reference's weights as Hugging Face folders, on the ranks that train."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.checkpoint.formats.peft import read_adapters
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Actor
from mrl.megatron.param_broadcast import broadcast_params, first_here
from mrl.megatron.trainable_model import TrainableModel
from mrl.models._positions import engine_rope
from mrl.models.base import ArchSpec
from mrl.models.presets import initializer_range
from mrl.resharding.random_init import init_adapters, random_init
from mrl.resharding.weight_sync import gather_layouts
from mrl.trainer.hf_export import export_to_hf, write_adapters, write_model_folder
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.run_plan import RunPlan


def read_weights(model: TrainableModel, arch: ArchSpec, folder: str, tensors: Mapping[str, Tensor]) -> None:
    """Collective over the job: reads weights; one rank reads each shard and broadcasts it to its replicas.

    Args:
        model: Model whose layout the tensors have.
        arch: Architecture of the model.
        folder: Hugging Face folder.
        tensors: Tensors to fill: those of the model, or another set of weights with its layout.
    """
    layout, own = model.layout(), first_here(model.chunks)
    with raise_on_all_ranks():
        load_from_hf(
            folder,
            arch,
            {name: stored for name, stored in layout.items() if name in own},
            {name: tensor for name, tensor in tensors.items() if name in own},
        )
    broadcast_params(model.chunks, tensors, model.device)


class ActorWeights:
    """Reader and writer of the actor's weights; methods are collective over the job unless they say otherwise.

    Args:
        plan: Resolved and validated config.
        actor: Actor of this rank; None on ranks that only sample.
        groups: Process groups and coordinates of this rank.
    """

    def __init__(self, plan: RunPlan, actor: Actor | None, groups: ProcessGroups) -> None:
        self._plan, self._optional_actor, self._groups = plan, actor, groups

    @property
    def _actor(self) -> Actor:
        if self._optional_actor is None:
            raise RuntimeError(f"rank {self._groups.rank} only samples and has no actor")
        return self._optional_actor

    def load_initial(self) -> None:
        """Collective over the job: fills the actor from `model.path`, or with random weights for a preset.

        Low-rank adapters are read from `actor.lora.adapter_path`, or new.
        """
        with on_trainers(self._groups) as here:
            if not here:
                return
            self._load_model()
            if self._actor.adapters is not None:
                self._load_adapters(self._plan.config.actor.lora.adapter_path, self._actor.trained_tensors())
            self._actor.weights_changed()

    def load_base(self) -> None:
        """Collective over the job: fills the weights that low-rank adapters leave as they are; without adapters none.

        Before a checkpoint is loaded, which then has only the adapters.
        """
        with on_trainers(self._groups) as here:
            if here and self._actor.adapters is not None:
                self._load_model()

    def _load_model(self) -> None:
        config, tensors = self._plan.config, self._actor.named_tensors()
        if config.model.path is not None:
            self._read(config.model.path, tensors)
            return
        layout, deviation = self._actor.layout(), initializer_range(config.model.overrides)
        with raise_on_all_ranks():
            random_init(self._plan.arch, layout, tensors, config.run.seed, deviation)

    def _load_adapters(self, folder: str | None, tensors: Mapping[str, Tensor]) -> None:
        """Fills adapters: the actor's, or those of the reference; `folder` None: with initial values."""
        adapters, arch, config = self._actor.adapters, self._plan.arch, self._plan.config
        if adapters is None:
            raise RuntimeError("the actor has no adapters")
        with raise_on_all_ranks():
            if folder is None:
                init_adapters(arch, config.actor.lora, adapters.layout(), tensors, config.run.seed)
            else:
                read_adapters(folder, arch, config.actor.lora, adapters.layout(), tensors)

    def load_reference(self, path: str) -> None:
        """Collective over the job: fills the reference's tensors from a Hugging Face folder.

        With low-rank adapters: from a PEFT folder, or for `model.path` those that have no effect.
        """
        with on_trainers(self._groups) as here:
            if here:
                tensors = self._actor.reference_tensors()
                if self._actor.adapters is None:
                    self._read(path, tensors)
                else:  # the model itself, or adapters of it
                    self._load_adapters(None if path == self._plan.config.model.path else path, tensors)
                self._actor.compare_reference()

    def copy_to_reference(self) -> None:
        """Collective over the job: copies the current actor weights into the reference."""
        with on_trainers(self._groups) as here:
            if here:
                self._actor.copy_to_reference()

    def _read(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        read_weights(self._actor, self._plan.arch, folder, tensors)

    def export(self, folder: Path) -> None:
        """Collective over the job: writes the actor as a Hugging Face folder; one rank of each host writes files.

        Low-rank adapters are merged into the weights.
        """
        with on_trainers(self._groups) as here:
            if not here:
                return
            layouts, model = gather_layouts(self._actor.layout()), self._plan.config.model
            tensors = self._actor.merged_tensors()
            hosts = [""] * dist.get_world_size()
            dist.all_gather_object(hosts, socket.gethostname())
            writers = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
            export_to_hf(folder, self._plan.arch, layouts, tensors, dtype=model.dtype, like=model.path, writers=writers)
            with raise_on_all_ranks():
                if self._groups.rank == 0:
                    self._plan.tokenizer.save(folder)

    def export_adapters(self, folder: Path) -> None:
        """Collective over the job: writes the actor's low-rank adapters as a PEFT folder."""
        with on_trainers(self._groups) as here:
            if not here:
                return
            plan, adapters = self._plan, self._actor.adapters
            if adapters is None:
                raise RuntimeError("the actor has no adapters")
            layouts = gather_layouts(adapters.layout())
            write_adapters(
                folder,
                plan.arch,
                plan.config.actor.lora,
                layouts,
                self._actor.trained_tensors(),
                base=plan.config.model.path,
            )

    @property
    def has_adapters(self) -> bool:
        """True if the actor has low-rank adapters."""
        return self._plan.config.actor.lora.rank > 0

    def export_trained(self, folder: Path) -> None:
        """Collective over the job: writes what training changes: a PEFT folder with adapters, else the model."""
        (self.export_adapters if self.has_adapters else self.export)(folder)

    def model_folder(self, further: Mapping[str, Any]) -> Path:
        """Collective over the ranks that sample: writes a model folder without weights into the run folder.

        Args:
            further: Additional keys of config.json.

        Returns:
            Path of the folder, with config.json and tokenizer.
        """
        plan, model = self._plan, self._plan.config.model
        folder, dtype = plan.run.root / "model", plan.config.rollout.dtype or model.dtype
        with raise_on_all_ranks(self._groups.samplers):
            if self._groups.rank == self._groups.grid.samplers.start:
                keys = {**engine_rope(plan.arch), **further}
                write_model_folder(folder, plan.arch, dtype, plan.tokenizer, like=model.path, further=keys)
        return folder
