"""Comparisons of an engine's responses with its own under other weights, and with the actor's scores.

All are collective over the job's ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from acceptance.fixture import Bench
from acceptance.result import CheckError, Facts
from mrl.distributed.collectives import broadcast_from_rank_0
from mrl.engines.trtllm import inspection
from mrl.resharding.megatron import stage_layers
from mrl.trainer import weight_sync_check
from mrl.types import Rollout, RolloutBatch, SamplingMask

NUM_PROMPTS = 8
MEAN_NATS = 0.05
"""Allowed mean difference between the log-probabilities of two programs computing in bfloat16, whose logits have 8
bits: 2^-8 of a log-probability of -12. Another temperature makes a larger difference.
"""

BINS = (0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, math.inf)
"""Edges of the histogram, nats."""


def check_weight_syncs(bench: Bench) -> tuple[list[Rollout], Facts]:
    """Samples greedily under the same weights, other weights, and the first again; returns the first responses.

    Raises:
        CheckError: The responses change with the same weights, stay with others, or do not return.
    """
    bench.refit()
    first = bench.greedy_responses()
    bench.refit()
    same = weight_sync_check.compare(first, bench.greedy_responses())
    with bench.other_weights():
        bench.refit()
        other = weight_sync_check.compare(first, bench.greedy_responses())
    bench.refit()
    back = weight_sync_check.compare(first, bench.greedy_responses())
    facts: Facts = {"same weights": str(same), "other weights": str(other), "first weights again": str(back)}
    if not same.within(bench.tolerance):
        raise CheckError(f"a second sync of the same weights changed the responses: {same}", facts)
    if other.within(bench.tolerance):
        raise CheckError(f"a sync of other weights did not change the responses: {other}", facts)
    if not back.within(bench.tolerance):
        raise CheckError(f"syncing the first weights again does not restore the responses: {back}", facts)
    return first, facts | {"tolerance, nats": bench.tolerance}


def sample(bench: Bench) -> list[Rollout]:
    """Returns samples under the session's settings, broadcast from rank 0, since the ranks score the same sequences."""
    prompts = bench.trainer.state.source.next(NUM_PROMPTS)
    found: list[Rollout] = broadcast_from_rank_0(bench.generate(prompts, bench.trainer.rollout_worker.train_sampling))
    return found


def actor_logprobs(bench: Bench, rollouts: Sequence[Rollout]) -> Tensor:
    """Returns the actor's log-probabilities of all sampled tokens, with the engine's experts where it returned them."""
    trainer, batch = bench.trainer, batch_of(rollouts)
    routed = [each.routed_experts for each in rollouts if each.routed_experts is not None]
    if routed:
        own = list(stage_layers(trainer.arch, trainer.groups.grid)[trainer.groups.coords.pp])
        batch.routed_experts_P = torch.cat(routed)[:, own]
    found, _ = trainer.actor.score(batch)
    return found


def engine_logprobs(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns the engine's log-probabilities of all sampled tokens."""
    return torch.tensor([x for each in rollouts for x in each.rollout_logprobs])


def difference_facts(bench: Bench, apart: Tensor) -> Facts:
    """Returns statistics of the differences between two programs' log-probabilities, and the probe's result."""
    counts = [int(((apart >= low) & (apart < high)).sum()) for low, high in itertools.pairwise(BINS)]
    edges = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(BINS)]
    facts: Facts = {
        "tokens": apart.numel(),
        "mean difference, nats": float(apart.mean()),
        "largest, nats": float(apart.max()),
        "99 of 100 below, nats": float(apart.quantile(0.99)),
        "histogram, nats": dict(zip(edges, counts, strict=True)),
    }
    found = inspection.probe_result(bench.trainer.rollout_worker.engine)
    if found is not None:
        facts["probe"] = f"scores {found.scores.value}; logits are {'' if found.has_logits else 'not '}returned"
    return facts


def batch_of(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Packs rollouts into a batch for the actor."""
    tokens = [token for each in rollouts for token in (*each.prompt.prompt_ids, *each.response_ids)]
    lens = torch.tensor([(len(each.prompt.prompt_ids), len(each.response_ids)) for each in rollouts])
    supports = [each.kept_tokens for each in rollouts if each.kept_tokens is not None]
    return RolloutBatch(
        tokens_P=torch.tensor(tokens, dtype=torch.int64),
        prompt_lens_B=lens[:, 0],
        response_lens_B=lens[:, 1],
        response_mask_R=torch.ones(int(lens[:, 1].sum()), dtype=torch.bool),
        rollout_logprobs_R=engine_logprobs(rollouts),
        group_id_B=torch.tensor([each.prompt.uid for each in rollouts]),
        rewards_B=torch.zeros(len(rollouts)),
        kept_tokens_R=SamplingMask.join(supports) if supports else None,
    )
