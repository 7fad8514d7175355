"""Critic of a run: initial weights, values, updates, and sharing of the device with the actor.

The model is in `megatron/critic.py`, the loss in `algorithms/_critic.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist

from mrl.algorithms._critic import ValueObjective
from mrl.algorithms.base import SumReduce, required
from mrl.algorithms.functional.distributed_stats import spread_metrics, spread_sums
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.peft import read_adapters
from mrl.distributed.collectives import all_reduce_, raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Actor
from mrl.megatron.critic import Critic
from mrl.megatron.lora import Adapters
from mrl.megatron.param_broadcast import broadcast_params, first_here
from mrl.models.base import ArchSpec
from mrl.observability.metrics import combine
from mrl.resharding.megatron import OUTPUT
from mrl.resharding.random_init import init_adapters
from mrl.rollout.dispatch import StepBatch
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.run_plan import RunPlan
from mrl.trainer.validation.critic import critic_config
from mrl.types import RolloutBatch

Metrics = dict[str, float]

EXPLAINED_EPS = 1e-5
"""Added to the variance of the returns, so that `critic/vf_explained_var` is finite if all are equal; verl's value."""


class RunCritic:
    """Critic of the run; every method is collective over the ranks that train.

    Attributes:
        model: Value model.
    """

    def __init__(
        self, plan: RunPlan, arch: ArchSpec, groups: ProcessGroups, device: torch.device, actor: Actor
    ) -> None:
        """Collective over the ranks that train: builds the model without weights.

        Args:
            plan: Resolved and validated config.
            arch: Architecture of the critic.
            groups: Process groups and coordinates of this rank.
            device: Device of this rank.
            actor: Actor, offloaded while the critic is on the device.
        """
        self._config, self._groups, self._actor = critic_config(plan.config), groups, actor
        self.model = Critic(self._config, arch, groups, device)
        self._seed = plan.config.run.seed
        if self.model.adapters is not None and plan.config.critic.path is None:
            self.model.borrow_weights(actor)
            actor.offload()  # before the engine measures the free memory
        self.model.offload()
        self._path = plan.config.critic.path
        self._objective = ValueObjective(plan.config.critic, plan.config.rollout)

    def start_optimizer(self) -> None:
        """Collective over the ranks that train: creates the optimizer with the run's learning-rate schedule."""
        self.model.start_optimizer(learning_rate(self._config))
        self.model.offload()

    def start(self) -> None:
        """Collective over the ranks that train: loads `critic.path`, or copies the actor's current weights.

        With low-rank adapters, the critic uses the actor's frozen weights instead of copies, and its adapters are new
        or those of `critic.lora.adapter_path`.
        """
        with self._on_device():
            if self.model.borrows_weights:
                self.model.zero_head()
            elif self._path is None:
                self.model.init_from_actor(self._actor.merged_tensors())
            else:
                self._read(self._path)
            if self.model.adapters is not None:
                self._load_adapters(self.model.adapters)

    def load_base(self) -> None:
        """Collective over the ranks that train: loads the weights under the adapters, which checkpoints do not have."""
        if self.model.adapters is not None and self._path is not None:
            with self._on_device():
                self._read(self._path)

    def _load_adapters(self, adapters: Adapters) -> None:
        lora, arch, tensors = self._config.actor.lora, self.model.chunks[0].arch, self.model.trained_tensors()
        with raise_on_all_ranks():
            if lora.adapter_path is None:
                init_adapters(arch, lora, adapters.layout(), tensors, self._seed)
            else:
                read_adapters(lora.adapter_path, arch, lora, adapters.layout(), tensors, key="critic.lora")
        self.model.weights_changed()

    def values(self, batch: RolloutBatch) -> None:
        """Collective over the ranks that train: computes `batch.values_R`."""
        with self._on_device():
            batch.values_R = self.model.values(batch)

    def update(self, data: StepBatch, reduce: SumReduce) -> Metrics:
        """Collective over the ranks that train: runs `critic.ppo_epochs` passes of optimizer steps; returns metrics."""
        stats = []
        with self._on_device():
            for _ in range(self._config.actor.ppo_epochs):
                for rows in data.minibatches:
                    minibatch = data.batch.select(rows)
                    self._objective.weigh(minibatch, reduce)
                    stats.append(self.model.update(minibatch, self._objective.loss))
        return combine(stats) | self._value_metrics(data.batch)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Offloads the actor, as far as `actor.*_offload` asks for it, and the critic at the end."""
        self._actor.offload(keep=["weights"] if self.model.borrows_weights else [])
        yield
        self.model.offload()

    def _value_metrics(self, batch: RolloutBatch) -> Metrics:
        """Collective over data-parallel: returns statistics of values, returns and advantages of the step."""
        values_R, returns_R = required(batch.values_R, "values_R"), required(batch.returns_R, "returns_R")
        columns = {
            "critic/values": values_R,
            "critic/returns": returns_R,
            "critic/advantages": required(batch.advantages_R, "advantages_R"),
            "": returns_R - values_R,
        }
        sums, largest = spread_sums(list(columns.values()), batch.valued_R)
        all_reduce_(sums, self._groups.dp)
        all_reduce_(largest, self._groups.dp, dist.ReduceOp.MAX)
        found = dict(zip(columns, spread_metrics(sums, largest), strict=True))
        metrics = {
            f"{name}/{what}": getattr(spread, what)
            for name, spread in found.items()
            if name
            for what in ("mean", "max", "min")
        }
        explained = 1 - found[""].variance / (found["critic/returns"].variance + EXPLAINED_EPS)
        return metrics | {"critic/vf_explained_var": explained}

    def _read(self, folder: str) -> None:
        """Collective over the ranks that train: reads weights; a value head that the folder lacks becomes zero."""
        model, own = self.model, first_here(self.model.chunks)
        tensors = model.named_tensors()
        with raise_on_all_ranks(), closing(HfSource(folder)) as weights:
            weights.check()
            wanted = {
                name: stored
                for name, stored in model.layout().items()
                if name in own and (weights.arch.value_head or not name.endswith(OUTPUT))
            }
            weights.fill(wanted, {name: tensors[name] for name in wanted})
            if not weights.arch.value_head:
                for name in own:
                    if name.endswith(OUTPUT):
                        tensors[name].zero_()
        broadcast_params(model.chunks, tensors, model.device)
        model.weights_changed()
