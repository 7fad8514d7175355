"""The reward model in the run: which tokens it reads of a sample, its weights, and its turns on the device.

Owns what it says of samples; how that becomes a reward is `rewards/scorer.py`'s. It is a file and stays as it is: a
commit holds nothing of it, and a sample that comes again is scored again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.distributed.collectives import all_gather_ragged, everyone, together
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.actor import Policy
from mrl.megatron.forward_only import Frozen
from mrl.models.base import ArchSpec
from mrl.rewards._call import Outcome
from mrl.rewards.scorer import Key
from mrl.rollout.dispatch import StepBatch, pack
from mrl.rollout.sample_table import gather_table
from mrl.trainer.actor_weights import read_weights
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.resolve import Plan
from mrl.trainer.validation.frozen_models import guest_config
from mrl.types import Rollout

BEHIND = 0
"""A token that stands behind the last one and is never read: a value is of the state before a token."""


class RunRewardModel:
    """Of one run; every rank holds one and calls each method together with all of the job."""

    @staticmethod
    def of(plan: Plan, groups: ProcessGroups, device: torch.device, policy: Policy | None) -> RunRewardModel | None:
        """Collective over the job: that of the run; None: it has none."""
        return None if plan.reward is None else RunRewardModel(plan, plan.reward, groups, device, policy)

    def __init__(
        self, plan: Plan, arch: ArchSpec, groups: ProcessGroups, device: torch.device, policy: Policy | None
    ) -> None:
        """Collective over the job: builds the model and reads its weights, which then wait in host memory.

        Args:
            plan: The run's.
            arch: The reward model.
            groups: Who sits where.
            device: Of this rank.
            policy: The actor, which makes room for it; None: this rank does not train, and holds nothing of it.
        """
        path = plan.config.reward.model.path
        if path is None or plan.reader is None:
            raise RuntimeError("a reward model without a path")
        self._groups, self._policy, self._reader = groups, policy, plan.reader
        self._shares = plan.config.actor.use_prefix_grouper
        self._model: Frozen | None = None
        with on_trainers(groups):
            if policy is not None:
                policy.offload()
                self._model = Frozen(guest_config(plan.config), arch, groups, device)
                read_weights(self._model, arch, path, self._model.named_tensors())
                self._model.offload()

    def score(self, rollouts: Sequence[Rollout]) -> dict[Key, Outcome]:
        """Collective over the job: what the head gives at the last token of each sample.

        Args:
            rollouts: On the first rank of each replica; ignored on the others.
        """
        found: dict[Key, Outcome] = {}
        with together():
            read = self._read(rollouts if self._groups.leads_replica else (), found)
        table = gather_table(read, self._groups, ())
        if not len(table):
            return found
        data = pack(read, table, self._groups, table.num_prompts, shares=self._shares)
        with on_trainers(self._groups):
            told = self._scores(data)
        by_row = dict(all_gather_ragged(told, everyone()).tolist())
        keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
        scores = {key: by_row[row] for row, key in enumerate(keys)}
        return found | {_key(one): _outcome(scores[_key(one)]) for one in read}

    def _scores(self, data: StepBatch) -> Tensor:
        """Collective over the ranks that train: (row of the table, score) of the samples that this rank tells of."""
        if self._model is None or self._policy is None:
            return torch.empty(0, 2, dtype=torch.float64)
        self._policy.offload()
        values_R = self._model.values(data.batch)
        self._model.offload()
        scores_B = values_R[data.batch.response_lens_B.cumsum(0) - 1]
        coords = self._groups.coords
        tells = coords.tp == coords.cp == coords.pp == 0  # of the ranks that have the same samples
        return torch.stack([data.index_B.double(), scores_B.double()], dim=1)[: None if tells else 0]

    def _read(self, rollouts: Sequence[Rollout], failed: dict[Key, Outcome]) -> list[Rollout]:
        """The samples with the tokens that it reads; what it cannot read is told in `failed`."""
        ids: dict[Key, list[int]] = {}
        for rollout in rollouts:
            try:
                ids[_key(rollout)] = self._reader.read(rollout)
            except UserError as error:
                failed[_key(rollout)] = Outcome(math.nan, str(error))
        shared = self._prompts(ids)
        return [
            _with_tokens(rollout, ids[_key(rollout)], shared[rollout.prompt.uid])
            for rollout in rollouts
            if _key(rollout) in ids
        ]

    @staticmethod
    def _prompts(ids: dict[Key, list[int]]) -> dict[int, int]:
        """Tokens with which all samples of a prompt begin: they are computed once."""
        groups: dict[int, list[list[int]]] = {}
        for (uid, _), tokens in ids.items():
            groups.setdefault(uid, []).append(tokens)
        return {uid: max(1, _num_shared(group)) for uid, group in groups.items()}


def _num_shared(group: list[list[int]]) -> int:
    """Tokens with which all begin: the first and the last in order differ first."""
    first, last = min(group), max(group)
    pairs = zip(first, last, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))


def _with_tokens(rollout: Rollout, ids: list[int], num_shared: int) -> Rollout:
    prompt, rest = tuple(ids[:num_shared]), [*ids[num_shared:], BEHIND]
    return Rollout(replace(rollout.prompt, prompt_ids=prompt), rollout.sample_index, rest, [0.0] * len(rest), "stop", 0)


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index


def _outcome(score: float) -> Outcome:
    return Outcome(score) if math.isfinite(score) else Outcome(math.nan, f"the reward model gave {score}")
