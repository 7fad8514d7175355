"""True on-policy mode: the actor's log-probabilities are the engine's in every bit, and its gradients the ordinary."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.engines.native.engine import NativeEngine
from mrl.errors import UserError
from mrl.models._positions import for_run
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from tests.engines.specs import spec_of
from tests.megatron import truncation
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    VOCAB,
    algorithm,
    full_gradients,
    make_batch,
    make_policy,
    own_part,
)
from tests.megatron.truncation import CUTS
from tests.models.rope import variants
from tests.ranks import run_ranks

pytestmark = pytest.mark.compiler

LAYOUTS = {
    "single": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp=2, rollout_tp=2),  # and sequence parallel
    "dp2": ParallelLayout(2),
    "pp2": ParallelLayout(2, pp=2),
    "tp4": ParallelLayout(4, tp=4, rollout_tp=4),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2, rollout_tp=2),
}
POSITIONS = variants(head_dim=16, original=16)
MODELS = {
    **ARCHS,  # so narrow that PyTorch's own products often add in the same order
    "wide": arch_from_preset(
        "qwen2_tiny", {"hidden_size": 512, "intermediate_size": 1100, "num_hidden_layers": 2}, VOCAB
    ),
    "phi4": for_run(  # three quarters of a head are rotated, cosine and sine have a factor
        arch_from_preset("phi3_tiny", {**POSITIONS["phi4_mini"][1], "num_hidden_layers": 2}, VOCAB), longest=17
    ),
}
GRADIENT = 1e-5
"""fp32; the norm of the difference over that of the gradient: sums in another order."""


def sampled(policy, cut, exact, **engine):
    """A step's samples by the actor's weights."""
    config = truncation.rollout_config(cut, gpu_memory_utilization=0.01, true_on_policy=exact, **engine)
    spec = spec_of(config, policy._arch, tp_group=policy._groups.rollout_tp, dtype=policy._dtype)
    return truncation.sampled(policy, NativeEngine(spec), cut)[0]


def differences(grid, cases, dtype, *, exact=True, actor=None, parallel=None, **engine):
    """Of each (model, cut): the largest difference of a token's log-probabilities, and how many differ at all."""
    groups, found = None, []
    for name, cut in cases:
        rollout = vars(truncation.rollout_config(CUTS.get(cut, {}), true_on_policy=exact))
        options = {"rollout": rollout, "actor": actor, "parallel": parallel, "dtype": dtype, "groups": groups}
        policy = make_policy(MODELS[name], grid, **options)
        groups = policy._groups
        batch = sampled(policy, CUTS.get(cut, {}), exact, **engine).batch
        diff_R = policy.score(batch)[0] - batch.rollout_logprobs_R
        found.append((float(diff_R.abs().max()), int((diff_R != 0).sum())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2", "tp4"])
def test_engine_and_actor_have_the_same_bits_in_every_layout(layout, dtype):
    cases = [(name, cut) for name in MODELS for cut in ("none", "together")] if layout in ("single", "tp2") else []
    cases = cases or [("wide", "none"), ("qwen3", "top_p")]
    for found in run_ranks(LAYOUTS[layout].world_size, differences, LAYOUTS[layout], cases, dtype):
        assert found == [(0.0, 0)] * len(cases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_mode_they_differ(dtype):
    """The same comparison sees that: it is no comparison of a thing with itself."""
    (found,) = run_ranks(1, differences, ParallelLayout(1), [("qwen2", "none"), ("qwen3", "top_p")], dtype, exact=False)
    assert all(largest > 0.0 and count > 0 for largest, count in found)


@pytest.mark.parametrize(
    "options",
    [
        {"actor": {"max_tokens_per_microbatch": 8}},
        {"actor": {"max_tokens_per_microbatch": 10_000, "logprob_chunk_tokens": 1}},
        {"actor": {"recompute": "full"}},
        {"max_num_seqs": 3, "max_num_batched_tokens": 4},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 5},
    ],
    ids=str,
)
def test_microbatches_chunks_and_how_the_engine_reads_change_no_bit(options):
    cases = [("qwen2", "none"), ("qwen3", "together"), ("phi4", "none")]
    for dtype in ("float32", "bfloat16"):
        (found,) = run_ranks(1, differences, ParallelLayout(1), cases, dtype, **options)
        assert found == [(0.0, 0)] * 3


def in_any_company(grid, dtype, seeds):
    """Scores of a batch, and of parts of it in another order, in microbatches of other sizes."""
    policy = make_policy(MODELS["wide"], grid, rollout={"true_on_policy": True}, dtype=dtype)
    batch = make_batch(12, longest=20)
    whole = policy.score(batch)[0].split(batch.response_lens_B.tolist())

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(rows=st.permutations(range(12)), num=st.integers(1, 12), most=st.integers(40, 400))
    def company(rows, num, most):
        policy._forward_backward._max_tokens = most
        part = batch.select(rows[:num])
        scored = policy.score(part)[0].split(part.response_lens_B.tolist())
        assert all(torch.equal(scored[i], whole[row]) for i, row in enumerate(rows[:num]))

    company()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_is_scored_alike_in_any_company(dtype):
    run_ranks(1, in_any_company, ParallelLayout(1), dtype, 0)


def gradients_of(grid, name, exact, options):
    policy = make_policy(
        ARCHS[name],
        grid,
        rollout={"true_on_policy": exact, "temperature": 0.8},
        actor={"clip_grad": 0.0, "use_distributed_optimizer": False, **options},
    )
    policy.start_optimizer(CONSTANT)
    batch = own_part(make_batch(longest=12), policy)
    batch.rollout_logprobs_R = policy.score(batch)[0]
    metrics = policy.update(batch, algorithm())
    return full_gradients(policy), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen2", "single", {}),
        ("qwen3", "single", {"recompute": "selective"}),
        ("llama", "single", {"recompute": "full", "logprob_chunk_tokens": 4}),
        ("qwen2_untied", "tp2", {}),
        ("qwen3", "tp2", {}),
        ("qwen2", "tp2_pp2", {}),
    ],
)
def test_gradients_are_the_ordinary_ones(name, layout, options):
    grid = LAYOUTS[layout]
    exact, metrics = run_ranks(grid.world_size, gradients_of, grid, name, True, options)[0]
    ordinary, expected = run_ranks(grid.world_size, gradients_of, grid, name, False, options)[0]
    assert exact.keys() == ordinary.keys()
    for key, gradient in ordinary.items():
        assert float((exact[key] - gradient).norm() / gradient.norm()) < GRADIENT, key
    assert metrics["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=1e-5)


def first_update(grid, spoil):
    policy = make_policy(ARCHS["qwen2"], grid, rollout=vars(truncation.rollout_config({}, true_on_policy=True)))
    data = sampled(policy, {}, True)
    batch = replace(data.batch, rewards_B=torch.ones(data.batch.num_sequences))
    grpo = build(AlgorithmConfig(name="grpo"), RolloutConfig(n=2))
    batch.advantages_R = torch.ones(batch.response_mask_R.numel())
    batch.weights_R = batch.metric_weights_R = batch.response_mask_R.float() / 60
    if spoil and policy._groups.coords.dp == 0:
        batch.rollout_logprobs_R[3] = batch.rollout_logprobs_R[3].nextafter(torch.tensor(0.0))
    policy.start_optimizer(CONSTANT)
    before = {name: tensor.clone() for name, tensor in policy.named_tensors().items()}
    try:
        metrics = policy.update(batch, grpo, is_first_update=True)
    except UserError as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.named_tensors().items())
        return str(error), error.on_all_ranks
    return metrics


@pytest.mark.parametrize("layout", ["single", "dp2", "pp2"])
def test_a_token_whose_last_bit_differs_ends_the_step_on_all_ranks_before_its_update(layout):
    grid = LAYOUTS[layout]
    for metrics in run_ranks(grid.world_size, first_update, grid, False):
        names = ("probs_diff_max", "probs_diff_mean", "logprobs_diff_max", "logprobs_differing")
        assert {name: metrics[f"training/rollout_{name}"] for name in names} == dict.fromkeys(names, 0.0)
        assert metrics["rollout_corr/kl"] == metrics["rollout_corr/k3_kl"] == 0.0
    for said, everywhere in run_ranks(grid.world_size, first_update, grid, True):
        assert "the actor's log-probabilities of 1 tokens of this minibatch differ from the engine's" in said
        assert everywhere
