"""Scoring of samples with a reward model on the ranks that train.

The weights are read from a folder and never change, so checkpoints do not contain them. `rewards/scorer.py` combines
the scores with other reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.distributed.collectives import all_gather_ragged, raise_on_all_ranks, world_group
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.actor import Actor
from mrl.megatron.forward_only_model import ForwardOnlyModel
from mrl.models.base import ArchSpec
from mrl.rewards._bound_reward import Outcome
from mrl.rewards.scorer import Key
from mrl.rollout.dispatch import StepBatch, dispatch_samples
from mrl.rollout.sample_table import gather_table
from mrl.trainer.actor_weights import read_weights
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.run_plan import RunPlan
from mrl.trainer.validation.forward_only import forward_only_config
from mrl.types import Rollout

PADDING = 0
"""Token appended to each sample: the value at a token is that of the state before it, so the score of a complete sample
is the value at this extra token."""


class RunRewardModel:
    """Reward model of the run; every method is collective over the job."""

    @staticmethod
    def of(plan: RunPlan, groups: ProcessGroups, device: torch.device, actor: Actor | None) -> RunRewardModel | None:
        """Collective over the job: returns the run's reward model, None if the config has none."""
        return None if plan.reward is None else RunRewardModel(plan, plan.reward, groups, device, actor)

    def __init__(
        self, plan: RunPlan, arch: ArchSpec, groups: ProcessGroups, device: torch.device, actor: Actor | None
    ) -> None:
        """Collective over the job: builds the model, reads its weights and offloads them to host memory.

        Args:
            plan: Resolved and validated config.
            arch: Architecture of the reward model.
            groups: Process groups and coordinates of this rank.
            device: Device of this rank.
            actor: Actor, offloaded while the reward model is on the device; None on ranks that only sample.
        """
        path = plan.config.reward.model.path
        if path is None or plan.reward_encoder is None:
            raise RuntimeError("RunRewardModel needs reward.model.path and plan.reward_encoder; one of them is None")
        self._groups, self._actor, self._reader = groups, actor, plan.reward_encoder
        self._shares = plan.config.actor.use_prefix_grouper
        self._model: ForwardOnlyModel | None = None
        with on_trainers(groups):
            if actor is not None:
                actor.offload()
                self._model = ForwardOnlyModel(forward_only_config(plan.config), arch, groups, device)
                read_weights(self._model, arch, path, self._model.named_tensors())
                self._model.offload()

    def score(self, rollouts: Sequence[Rollout]) -> dict[Key, Outcome]:
        """Collective over the job: returns the value head's output after the last token of each sample.

        Args:
            rollouts: Samples on the first rank of each replica; ignored on other ranks.

        Returns:
            Scores of these samples; NaN with an error message for a sample that the model cannot read.
        """
        failed: dict[Key, Outcome] = {}
        with raise_on_all_ranks():
            encoded = self._encode(rollouts if self._groups.is_replica_leader else (), failed)
        table = gather_table(encoded, self._groups, ())
        if not len(table):
            return failed
        data = dispatch_samples(encoded, table, self._groups, table.num_prompts, keep_groups=self._shares)
        with on_trainers(self._groups):
            own = self._scores(data)
        by_row = dict(all_gather_ragged(own, world_group()).tolist())
        keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
        scores = {key: by_row[row] for row, key in enumerate(keys)}
        return failed | {_key(one): _outcome(scores[_key(one)]) for one in encoded}

    def _scores(self, data: StepBatch) -> Tensor:
        """Collective over the ranks that train: returns (row of the table, score) on one rank of each dp index."""
        if self._model is None or self._actor is None:
            return torch.empty(0, 2, dtype=torch.float64)
        self._actor.offload()
        values_R = self._model.values(data.batch)
        self._model.offload()
        scores_B = values_R[data.batch.response_lens_B.cumsum(0) - 1]
        coords = self._groups.coords
        is_first = coords.tp == coords.cp == coords.pp == 0
        return torch.stack([data.index_B.double(), scores_B.double()], dim=1)[: None if is_first else 0]

    def _encode(self, rollouts: Sequence[Rollout], failed: dict[Key, Outcome]) -> list[Rollout]:
        """Returns the samples in the reward model's tokens; adds samples that it cannot read to `failed`."""
        ids: dict[Key, list[int]] = {}
        for rollout in rollouts:
            try:
                ids[_key(rollout)] = self._reader.encode(rollout)
            except UserError as error:
                failed[_key(rollout)] = Outcome(math.nan, str(error))
        shared = self._prompt_lens(ids)
        return [
            _with_tokens(rollout, ids[_key(rollout)], shared[rollout.prompt.uid])
            for rollout in rollouts
            if _key(rollout) in ids
        ]

    @staticmethod
    def _prompt_lens(ids: dict[Key, list[int]]) -> dict[int, int]:
        """Returns the length of the prefix that all samples of a prompt share, which is computed once."""
        groups: dict[int, list[list[int]]] = {}
        for (uid, _), tokens in ids.items():
            groups.setdefault(uid, []).append(tokens)
        return {uid: max(1, _num_shared(group)) for uid, group in groups.items()}


def _num_shared(group: list[list[int]]) -> int:
    """Returns the length of the common prefix of token lists."""
    first, last = min(group), max(group)  # these two differ at least as early as any other pair
    pairs = zip(first, last, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))


def _with_tokens(rollout: Rollout, ids: list[int], num_shared: int) -> Rollout:
    prompt, rest = tuple(ids[:num_shared]), [*ids[num_shared:], PADDING]
    return Rollout(replace(rollout.prompt, prompt_ids=prompt), rollout.sample_index, rest, [0.0] * len(rest), "stop", 0)


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index


def _outcome(score: float) -> Outcome:
    return Outcome(score) if math.isfinite(score) else Outcome(math.nan, f"the reward model returned {score}")
