"""Tokens that sequences begin with alike, computed once: the losses and the whole gradient of each sequence alone."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mrl.algorithms._critic import ValueObjective
from mrl.config.config import CriticConfig, RolloutConfig
from mrl.data.shared_prefix import shared_prefixes
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import stage_layers
from mrl.types import RolloutBatch
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    MIXTURES,
    SHALLOW_MIXTURE,
    VOCAB,
    algorithm,
    full_gradients,
    make_critic,
    make_policy,
    own_part,
)
from tests.ranks import run_ranks

GRADIENT = 1e-6  # of the norm of all parameters as one vector; fp32 sums in another order: 6.5e-7 is found
METRIC = 2e-6  # fp32 sums in another order: 8e-7 is found
ROUNDING = 2e-7  # of a metric that is 0 but for it
EXAMPLES = 3
DENSE = replace(ARCHS["qwen3"], num_layers=2)
WINDOWS = replace(DENSE, sliding_window=4, windowed_layers=(1,))
EXPERTS = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1.0,
    "moe_z_loss_coeff": 0.1,
    "router_replay": "rollout",
}
CASES = {
    "single": (ParallelLayout(1), DENSE, {}),
    "tp2_sp": (ParallelLayout(2, tp=2), DENSE, {"recompute": "selective"}),
    "pp2": (ParallelLayout(2, pp=2), DENSE, {"recompute": "full"}),
    "cp2": (ParallelLayout(2, cp=2), DENSE, {}),
    "windows": (ParallelLayout(1), WINDOWS, {}),
    "cp2_windows": (ParallelLayout(2, cp=2), WINDOWS, {"recompute": "selective"}),
    "cp2_recomputed": (ParallelLayout(2, cp=2), DENSE, {"recompute": "full"}),
    "experts": (ParallelLayout(2, tp=2, ep=2, etp=1), SHALLOW_MIXTURE, EXPERTS),
    "cp2_experts": (ParallelLayout(2, cp=2, ep=2), SHALLOW_MIXTURE, EXPERTS),
    "tp2_latent": (ParallelLayout(2, tp=2), MIXTURES["deepseek_v3"], {"recompute": "selective"}),
    "pp2_latent": (ParallelLayout(2, pp=2), MIXTURES["deepseek_v2"], {"recompute": "full"}),
}

# few tokens: some prompts are the beginnings of others, and so are some answers
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
answers = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4)
families = st.lists(st.tuples(prompts, answers), min_size=2, max_size=4)


@cache
def drawn():
    """Prompts with their answers, the same in every run: of many examples those with most tokens."""
    found = []

    @settings(max_examples=30, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(families)
    def collect(example):
        found.append(example)

    collect()
    return sorted(found, key=lambda example: len(str(example)))[-EXAMPLES:]


def batch_of(example, grid):
    """With all that losses ask for; the experts of a token are the same after the same tokens."""
    pairs = [(prompt, answer) for prompt, answers in example for answer in answers]
    prompt_lens, response_lens = (torch.tensor([len(pair[part]) for pair in pairs]) for part in (0, 1))
    total = int(response_lens.sum())
    generator = torch.Generator().manual_seed(total)
    tokens = torch.tensor([token for prompt, answer in pairs for token in (*prompt, *answer)]) * 7 % VOCAB
    weights = torch.linspace(0.5, 1.5, total) / total
    lens = (prompt_lens + response_lens).tolist()
    arch = SHALLOW_MIXTURE
    scores = torch.rand(sum(lens), arch.num_layers, arch.moe.num_experts, generator=generator)
    chosen = scores.topk(arch.moe.top_k, -1).indices[shared_prefixes(tokens, lens).distinct_P].to(torch.int16)
    return RolloutBatch(
        tokens_P=tokens,
        prompt_lens_B=prompt_lens,
        response_lens_B=response_lens,
        response_mask_R=torch.ones(total, dtype=torch.bool),
        rollout_logprobs_R=-4 - torch.rand(total, generator=generator),
        group_id_B=torch.tensor([index for index, (_, answers) in enumerate(example) for _ in answers]),
        rewards_B=torch.zeros(len(pairs)),
        routed_experts_P=chosen[:, stage_layers(arch, grid)[0]],
        advantages_R=torch.randn(total, generator=generator),
        values_R=torch.randn(total, generator=generator),
        returns_R=torch.randn(total, generator=generator),
        weights_R=weights,
        metric_weights_R=weights.clone(),
    )


def computed(model, batch):
    """Rows of this rank."""
    return sum(micro.tokens.numel() for micro in model._forward_backward.microbatches(batch, None))


def updates(grid, arch, actor, examples):
    """With shared prompts, then without: rows, and metrics and gradients of an actor's and a critic's update."""
    found = []
    for once in (True, False):
        options = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 10_000}
        options |= {**actor, "use_prefix_grouper": once}
        policy = make_policy(arch, grid, actor=options)
        critic = make_critic(arch, grid, groups=policy._groups, actor={**options, "router_replay": "none"})
        objective = ValueObjective(CriticConfig(), RolloutConfig())
        for model in (policy, critic):
            model.start_optimizer(replace(CONSTANT, peak=0.0))  # the weights stay
        for example in examples:
            batch = own_part(batch_of(example, grid), policy)
            if not actor.get("router_replay"):
                batch.routed_experts_P = None
            acted = policy.update(batch, algorithm()), full_gradients(policy)
            batch.routed_experts_P = None
            found.append(
                (computed(policy, batch), acted, (critic.update(batch, objective.loss), full_gradients(critic)))
            )
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


def whole(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_each_sequence_alone(case):
    grid, arch, actor = CASES[case]
    for rank in run_ranks(grid.world_size, updates, grid, arch, actor, drawn()):
        assert sum(once[0] for once, _ in rank) < 0.8 * sum(alone[0] for _, alone in rank)
        for example, (once, alone) in zip(drawn(), rank, strict=True):
            if grid.world_size == 1:
                batch = batch_of(example, grid)
                inputs = [part[:-1] for part in batch.tokens_P.split(batch.seq_lens_B.tolist())]
                assert alone[0] == sum(len(part) for part in inputs)
                beginnings = {tuple(part[: end + 1].tolist()) for part in inputs for end in range(len(part))}
                assert once[0] == len(beginnings)
            for (metrics, gradients), (expected, reference) in zip(once[1:], alone[1:], strict=True):
                assert metrics == pytest.approx(expected, rel=METRIC, abs=ROUNDING), example
                difference = whole(gradients) - whole(reference)
                assert float(difference.norm()) <= GRADIENT * float(whole(reference).norm()) > 0, example
