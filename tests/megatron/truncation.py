"""A step under truncation on real ranks, from an engine's samples to the actor's scores; runs inside `run_ranks`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import build
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.config.config import AlgorithmConfig, CheckpointEngineConfig, RolloutConfig
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.megatron.actor import Actor
from mrl.resharding.weight_sync import WeightSync
from mrl.rollout.dispatch import StepBatch, dispatch_samples
from mrl.rollout.prompt_assignment import LengthHistory, generate
from mrl.rollout.sample_table import gather_table
from mrl.types import Prompt, RolloutBatch, SamplingMask

CUTS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "together": {"top_p": 0.8, "top_k": 5, "min_p": 0.1},
}
TEMPERATURE = 1.3
SAMPLES = 2
LONGEST = 6
FAR = LearningRate(0.05, 0.0, "constant", 0, 100)
"""An update after which other tokens are the likeliest."""


def rollout_config(cut: dict, **more) -> RolloutConfig:
    """Of the runs here."""
    return RolloutConfig(
        **{"n": SAMPLES, "temperature": TEMPERATURE, "prompt_length": 64, "response_length": 64, **cut, **more}
    )


def sampled(policy: Actor, engine: RolloutEngine, cut: dict) -> tuple[StepBatch, Tensor]:
    """Collective over the job: a step's samples on the ranks that train, by the actor's own weights.

    Returns:
        They, and the kept mass of their tokens, of the samples of all ranks by (uid, sample index).
    """
    groups = policy._groups
    WeightSync(policy.layout(), policy.named_tensors(), engine, CheckpointEngineConfig(1))(0)
    prompts = [Prompt(uid, tuple(range(uid + 1, 2 * uid + 2)), f"p{uid}", source=f"d:{uid}") for uid in range(5)]
    sampling = SamplingConfig(
        n=SAMPLES, max_tokens=LONGEST, temperature=TEMPERATURE, seed=4, ignore_eos=True, return_kept_tokens=True, **cut
    )
    rollouts = generate(engine, prompts, sampling, groups, LengthHistory(4.0))
    table = gather_table(rollouts, groups, [], with_kept_tokens=True)
    found: list = [None] * dist.get_world_size()
    mine = rollouts if groups.is_replica_leader else []
    dist.all_gather_object(found, {(one.prompt.uid, one.sample_index): one.log_kept_mass for one in mine})
    masses = {key: values for part in found for key, values in part.items()}
    mass = torch.tensor([value for key in sorted(masses) for value in masses[key]]).exp()
    assert abs(float(table["kept_mass"].sum() - mass.double().sum())) < 1e-4 * mass.numel()
    return dispatch_samples(rollouts, table, groups, 3, keep_groups=True), mass


def in_order(policy: Actor, batch: RolloutBatch, values: Tensor) -> Tensor:
    """Collective over the job: numbers of each response token [..., R], of all samples by (uid, sample index)."""
    parts = torch.split(values, batch.response_lens_B.tolist(), dim=-1)
    keys = zip(batch.group_id_B.tolist(), batch.sample_index_B.tolist(), strict=True)
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(zip(keys, parts, strict=True)))
    merged = {key: part for rank in found for key, part in rank.items()}
    return torch.cat([merged[key] for key in sorted(merged)], -1)


def uncorrected(policy: Actor, batch: RolloutBatch) -> Tensor:
    """Log-probabilities of the whole distribution, as a trainer gives them that knows of no support."""
    policy._truncated = False
    try:
        return policy.score(replace(batch, kept_tokens_R=None))[0]
    finally:
        policy._truncated = True


def updated(policy: Actor, data: StepBatch) -> list[dict[str, float]]:
    """Collective over the job: an update on each minibatch, of losses and of the entropies."""
    algorithm = build(AlgorithmConfig(name="grpo", entropy_coef=0.05), rollout_config({}))
    reduce = lambda tensor: _summed(tensor, policy)  # noqa: E731
    found = []
    for rows in data.minibatches:
        batch = data.batch.select(rows)
        uids = batch.group_id_B + batch.sample_index_B
        algorithm.advantages(batch, (uids % 3 - 1.0).double(), reduce)
        algorithm.weigh(batch, reduce)
        found.append(policy.update(batch, algorithm, is_first_update=not found))
    return found


def _summed(tensor: Tensor, policy: Actor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total, group=policy._groups.dp)
    return total


def of_each(batch: RolloutBatch, ids: list[int]) -> RolloutBatch:
    """The first sequence as often as there are ids, each time with another last token."""
    many = batch.select([0] * len(ids))
    many.tokens_P[many.seq_lens_B.cumsum(0) - 1] = torch.tensor(ids)
    return many


def last_support(batch: RolloutBatch) -> list[int]:
    """What was kept at the last token of the first sequence."""
    support: SamplingMask = batch.select([0]).kept_tokens_R
    return support.split([support.counts_R.numel() - 1, 1])[1].ids_K.tolist()
