"""The critic in the run: where its first weights come from, and its turns with the actor on the device.

Owns both, and the metrics of what it valued. The model is `megatron/critic.py`'s, its loss `algorithms/_critic.py`'s.
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
from mrl.distributed.collectives import reduce, together
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Policy
from mrl.megatron.critic import Critic
from mrl.megatron.param_broadcast import first_here, share
from mrl.models.base import ArchSpec
from mrl.observability.metrics import combine
from mrl.resharding.megatron import OUTPUT
from mrl.rollout.dispatch import StepBatch
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.resolve import Plan
from mrl.trainer.validation.critic import critic_config
from mrl.types import RolloutBatch

Metrics = dict[str, float]


class RunCritic:
    """Of one run; every rank holds one and calls each method together with all of the job.

    Attributes:
        model: The critic's.
    """

    def __init__(self, plan: Plan, arch: ArchSpec, groups: ProcessGroups, device: torch.device, policy: Policy) -> None:
        """Collective over the job: builds the model, without weights.

        Args:
            plan: The run's.
            arch: The critic.
            groups: Who sits where.
            device: Of this rank.
            policy: The actor, which makes room for the critic.
        """
        self._config, self._groups, self._policy = critic_config(plan.config), groups, policy
        self.model = Critic(self._config, arch, groups, device)
        self.model.offload()
        self._path = plan.config.critic.path
        self._objective = ValueObjective(plan.config.critic, plan.config.rollout)

    def start_optimizer(self) -> None:
        """Collective over the job: a fresh optimizer, and the schedule of the run."""
        self.model.start_optimizer(learning_rate(self._config))
        self.model.offload()

    def start(self) -> None:
        """Collective over the job: the first weights, from `critic.path`, else the actor's as they are."""
        with self._turn():
            if self._path is None:
                self.model.take(self._policy.named_tensors())
            else:
                self._read(self._path)

    def values(self, batch: RolloutBatch) -> None:
        """Collective over the job: sets `values_R`."""
        with self._turn():
            batch.values_R = self.model.values(batch)

    def update(self, data: StepBatch, reduce: SumReduce) -> Metrics:
        """Collective over the job: optimizer steps on the minibatches of a step, `critic.ppo_epochs` times."""
        stats = []
        with self._turn():
            for _ in range(self._config.actor.ppo_epochs):
                for rows in data.minibatches:
                    minibatch = data.batch.select(rows)
                    self._objective.weigh(minibatch, reduce)
                    stats.append(self.model.update(minibatch, self._objective.loss))
        return combine(stats) | self._told(data.batch)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Inside, the actor is away as far as `actor.*_offload` says, and outside the critic."""
        self._policy.offload()
        yield
        self.model.offload()

    def _told(self, batch: RolloutBatch) -> Metrics:
        """Collective over data-parallel: values, returns and advantages of the step's tokens."""
        values_R, returns_R = required(batch.values_R, "values_R"), required(batch.returns_R, "returns_R")
        columns = {
            "critic/values": values_R,
            "critic/returns": returns_R,
            "critic/advantages": required(batch.advantages_R, "advantages_R"),
            "": returns_R - values_R,
        }
        sums, largest = spread_sums(list(columns.values()), batch.valued_R)
        reduce(sums, self._groups.dp)
        reduce(largest, self._groups.dp, dist.ReduceOp.MAX)
        found = dict(zip(columns, spread_metrics(sums, largest), strict=True))
        told = {
            f"{name}/{what}": getattr(spread, what)
            for name, spread in found.items()
            if name
            for what in ("mean", "max", "min")
        }
        explained = 1 - found[""].variance / (found["critic/returns"].variance + EXPLAINED_EPS)
        return told | {"critic/vf_explained_var": explained}

    def _read(self, folder: str) -> None:
        """Collective over the job: of the ranks that hold the same parameter one reads it."""
        model, mine = self.model, first_here(self.model.chunks)
        tensors = model.named_tensors()
        with together(), closing(HfSource(folder)) as weights:
            weights.check()
            wanted = {
                name: stored
                for name, stored in model.layout().items()
                if name in mine and (weights.arch.value_head or not name.endswith(OUTPUT))
            }
            weights.fill(wanted, {name: tensors[name] for name in wanted})
            if not weights.arch.value_head:
                for name in mine:
                    if name.endswith(OUTPUT):
                        tensors[name].zero_()
        share(model.chunks, tensors, model.device)
        model.weights_changed()


EXPLAINED_EPS = 1e-5
"""Keeps `critic/vf_explained_var` finite where all returns are equal; verl's."""
