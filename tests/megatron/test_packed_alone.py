"""Sequences that are packed together: each has the log-probabilities, entropies and gradient that it has alone."""

from functools import cache

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mrl.parallel_layout import ParallelLayout
from mrl.types import RolloutBatch
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    LINEAR,
    SHALLOW_MIXTURE,
    VOCAB,
    full_gradients,
    make_policy,
    own_part,
    scores,
)
from tests.ranks import run_ranks

SCORE = 1e-5  # nats; fp32 sums of an attention in another order
GRADIENT = 1e-5  # of the largest element of a tensor: sums over all tokens
FLOOR = 1e-6  # of the largest element of all: some gradients are 0 but for rounding
ENTROPY = 0.3
"""Weight of the entropy beside the log-probability, so that both have a gradient."""

DENSE = ARCHS["qwen3"]
LAYOUTS = {
    "single": (ParallelLayout(1), DENSE, 24),
    "tp2": (ParallelLayout(2, tp=2), DENSE, 6),
    "pp2_vpp2": (ParallelLayout(2, pp=2, vpp=2), DENSE, 6),
    "dp2": (ParallelLayout(2), DENSE, 6),
    "cp2": (ParallelLayout(2, cp=2), DENSE, 6),
    "cp2_tp2": (ParallelLayout(4, tp=2, cp=2), DENSE, 4),
    "single_experts": (ParallelLayout(1), SHALLOW_MIXTURE, 10),
    "tp2_ep2": (ParallelLayout(2, tp=2, ep=2, etp=1), SHALLOW_MIXTURE, 5),
    "single_linear": (ParallelLayout(1), LINEAR, 12),
    "tp2_linear": (ParallelLayout(2, tp=2), LINEAR, 4),
}
"""Name -> layout, model, how many of the drawn batches, the last ones: they are the largest."""
EXAMPLES = 24

tokens = st.one_of(
    st.integers(0, 2),  # many sequences begin alike, to any depth
    st.integers(0, VOCAB - 1),  # few do
)
sequences = st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, min_size=1, max_size=6))
batches = st.tuples(st.lists(sequences, min_size=1, max_size=7), st.sampled_from([5, 12, 60]))


@cache
def drawn():
    """Batches and budgets of a microbatch, the same in every run."""
    found = []

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(batches)
    def collect(example):
        found.append(example)

    collect()
    return found


def batch_of(pairs):
    """With weights that tell the tokens apart."""
    prompt_lens, response_lens = (torch.tensor([len(pair[part]) for pair in pairs]) for part in (0, 1))
    total = int(response_lens.sum())
    weights = torch.linspace(0.5, 1.5, total)
    return RolloutBatch(
        tokens_P=torch.tensor([token for prompt, response in pairs for token in (*prompt, *response)]),
        prompt_lens_B=prompt_lens,
        response_lens_B=response_lens,
        response_mask_R=torch.ones(total, dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(total),
        group_id_B=torch.arange(len(pairs)),
        rewards_B=torch.zeros(len(pairs)),
        weights_R=weights,
    )


def loss(logprobs_R, entropy_R, microbatch):
    return (microbatch.weights_R * (ENTROPY * entropy_R - logprobs_R)).sum(), {}


def gradients(policy, microbatches):
    for wrapped in policy._data_parallel.chunks:
        wrapped.zero_grad_buffer()
    policy._forward_backward.run(microbatches, loss, backward=True)
    return full_gradients(policy)


def measured(grid, arch, examples):
    """Scores and gradients of each example."""
    policy = make_policy(arch, grid, actor={"use_distributed_optimizer": False})
    policy.start_optimizer(CONSTANT)
    found = []
    for pairs, budget in examples:
        batch = batch_of(pairs)
        if budget is None:
            parts = one_by_one(batch)
            scored = torch.cat([scores(policy, each) for each in parts], 1)
        else:
            policy._forward_backward._max_tokens = budget
            scored, parts = scores(policy, batch), [own_part(batch, policy)]
        microbatches = [
            micro
            for part in parts
            for micro in policy._forward_backward.microbatches(part, policy._sampling_distribution)
        ]
        found.append((scored, gradients(policy, microbatches)))
    return found


def one_by_one(batch):
    return [batch.select([row]) for row in range(batch.num_sequences)]


@pytest.fixture(scope="module")
def alone():
    known = {}

    def of(arch):
        if arch.family not in known:
            most = max(count for _, other, count in LAYOUTS.values() if other is arch)
            known[arch.family] = run_ranks(
                1, measured, ParallelLayout(1), arch, [(pairs, None) for pairs, _ in drawn()[-most:]]
            )[0]
        return known[arch.family]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_has_the_scores_and_gradient_that_it_has_alone(layout, alone):
    grid, arch, count = LAYOUTS[layout]
    examples, expected = drawn()[-count:], alone(arch)[-count:]
    for found in run_ranks(grid.world_size, measured, grid, arch, examples):
        for example, (scored, gradient), (scored_alone, gradient_alone) in zip(examples, found, expected, strict=True):
            torch.testing.assert_close(
                scored, scored_alone, rtol=0, atol=SCORE, msg=lambda text, case=example: f"{case}: {text}"
            )
            largest = max(float(value.abs().max()) for value in gradient_alone.values())
            for name, value in gradient_alone.items():
                allowed = GRADIENT * float(value.abs().max()) + FLOOR * largest
                difference = float((gradient[name] - value).abs().max())
                assert difference <= allowed, (example, name, difference, allowed)
