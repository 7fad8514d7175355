"""Random ragged batches, and data-parallel ranks as threads that sum what they pass to `reduce`."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.base import Algorithm, Outcomes, SumReduce
from mrl.types import RolloutBatch

VOCAB = 11


def make_batch(num_groups: int = 4, group_size: int = 3, seed: int = 0) -> RolloutBatch:
    """Sequences of different lengths whose log-probabilities under the three fixed policies differ enough to clip."""
    generator = torch.Generator().manual_seed(seed)
    num = num_groups * group_size
    prompt_lens_B = torch.randint(1, 4, (num,), generator=generator)
    response_lens_B = torch.randint(1, 8, (num,), generator=generator)
    num_responses = int(response_lens_B.sum())

    def logprobs() -> Tensor:
        return -(0.5 + 3.5 * torch.rand(num_responses, generator=generator))

    return RolloutBatch(
        tokens_P=torch.randint(0, VOCAB, (int((prompt_lens_B + response_lens_B).sum()),), generator=generator),
        prompt_lens_B=prompt_lens_B,
        response_lens_B=response_lens_B,
        response_mask_R=torch.rand(num_responses, generator=generator) > 0.15,
        rollout_logprobs_R=logprobs(),
        group_id_B=torch.arange(num_groups).repeat_interleave(group_size) * 10 + 5,
        rewards_B=torch.randint(0, 5, (num,), generator=generator).float(),
        ref_logprobs_R=logprobs(),
        proximal_logprobs_R=logprobs(),
        truncated_B=response_lens_B == 7,
        values_R=torch.randn(num_responses, generator=torch.Generator().manual_seed(seed + 1)),
        correct_B=torch.arange(num) % 3 != 1,
        sample_index_B=torch.arange(group_size).repeat(num_groups),
    )


def outcomes_of(batch: RolloutBatch) -> Outcomes:
    """The rows of a batch that holds the whole step."""
    if batch.truncated_B is None:
        raise RuntimeError("the batch has no truncated_B")
    return Outcomes(batch.rewards_B.double(), batch.group_id_B, batch.response_lens_B, batch.truncated_B)


def advantages_of(algorithm: Algorithm, batch: RolloutBatch) -> Tensor:
    """What the loop does before the batch's own phase: shape the rewards, take the outcome advantages."""
    outcomes = outcomes_of(batch)
    return algorithm.outcome_advantages(replace(outcomes, rewards_N=algorithm.shape_rewards(outcomes)))


def alone(tensor: Tensor) -> Tensor:
    """`reduce` of one data-parallel rank."""
    return tensor


def on_values(parts: list[Any], work: Callable[[Any, SumReduce], Tensor]) -> list[Tensor]:
    """What `work(part, reduce)` gives on a thread per part, as `on_ranks`."""
    found: list[Tensor] = [torch.empty(0)] * len(parts)

    def keep(part: Any, reduce: SumReduce, rank: int) -> None:
        found[rank] = work(part, reduce)

    on_ranks(parts, keep)
    return found


def on_ranks(parts: list[Any], work: Callable[[Any, SumReduce, int], None]) -> None:
    """Runs `work(part, reduce, rank)` on a thread per part; `reduce` sums over the parts in rank order."""
    slots: list[Tensor] = [torch.empty(0)] * len(parts)
    barrier = threading.Barrier(len(parts), timeout=10)  # a rank that fails or calls reduce less often ends the others

    def run(rank: int) -> None:
        def reduce(tensor: Tensor) -> Tensor:
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        work(parts[rank], reduce, rank)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(run, range(len(parts))))
