"""Updates do not depend on layout, packing or recomputation; the reference comes and goes without a trace."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.algorithms.base import build
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    LAYOUTS,
    algorithm,
    full_weights,
    make_batch,
    make_policy,
    own_part,
    scores,
    train,
)
from tests.megatron.trainings import ABSOLUTE, RELATIVE, assert_same, run
from tests.models.rope import both_spellings
from tests.ranks import run_ranks

BF16 = 0.05  # bf16 has 8 bits; losses are sums of both signs of order 0.1
PARAMETER_NORM = 1e-5  # relative; fp32 sum of squares
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def single():
    known = {}
    return lambda name: known.setdefault(name, run(ARCHS[name], ParallelLayout(1)))


SHARDED = ["tp2", "pp2", "pp2_vpp2", "dp2", "tp2_pp2"]
CASES = [(layout, name) for name in ("qwen2", "qwen3") for layout in SHARDED] + [
    ("tp2_pp2", "qwen2_untied"),
    ("tp2_pp2", "qwen3_windows"),
]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_three_updates_are_those_of_the_single_process(layout, name, single):
    """pp2_vpp2: with batched sends Megatron swaps two messages, and the gradient norm is wrong without an error."""
    assert_same(run(ARCHS[name], LAYOUTS[layout]), single(name))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("single", {"max_tokens_per_microbatch": 16}),
        ("single", {"max_tokens_per_microbatch": 10_000, "logprob_chunk_tokens": 1}),
        ("tp2_pp2", {"max_tokens_per_microbatch": 24}),
        ("tp2", {"recompute": "selective"}),
        ("pp2", {"recompute": "full"}),
        ("dp2", {"overlap_grad_reduce": True}),
        ("pp2_vpp2", {"overlap_grad_reduce": True}),
        ("dp2", {"use_distributed_optimizer": False}),
    ],
    ids=str,
)
def test_packing_recomputation_and_overlap_change_nothing(layout, options, single):
    """Packing: a schedule that scales the loss by the number of microbatches, in place, would be seen here."""
    assert_same(run(ARCHS["qwen2"], LAYOUTS[layout], actor=options), single("qwen2"))


def test_bf16_is_near_fp32(single):
    found, _ = run(ARCHS["qwen2"], LAYOUTS["tp2"], dtype="bfloat16")
    for ours, theirs in zip(found, single("qwen2")[0], strict=True):
        assert math.isclose(ours["actor/entropy"], theirs["actor/entropy"], rel_tol=BF16)
        assert math.isclose(ours["actor/loss"], theirs["actor/loss"], abs_tol=BF16)


def lonely(grid):
    policy = make_policy(ARCHS["qwen2"], grid)
    policy.start_optimizer(CONSTANT)
    batch = make_batch()
    part = batch if policy._groups.coords.dp == 0 else batch.select([])
    metrics = policy.update(part, algorithm())
    return metrics, [part.shape for part in policy.score(batch.select([]))]


def test_a_data_parallel_rank_without_sequences_takes_part():
    alone = run_ranks(1, lonely, LAYOUTS["single"])[0][0]
    for metrics, shapes in run_ranks(2, lonely, LAYOUTS["dp2"]):
        assert shapes == [(0,), (0,)]
        for key, value in alone.items():
            assert math.isclose(metrics[key], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE), key


def sft_step(grid, rollout=None):
    """Gradient norm of a supervised step and the weights it started from."""
    policy = make_policy(ARCHS["qwen2"], grid, actor={"clip_grad": 0.0}, rollout=rollout)
    weights = full_weights(policy)
    policy.start_optimizer(CONSTANT)
    sft = build(AlgorithmConfig(name="sft"), RolloutConfig())
    return policy.update(own_part(make_batch(), policy), sft), weights


@pytest.fixture(scope="module")
def by_transformers():
    """Loss and gradient norm of `sft_step`."""
    import transformers

    weights = run_ranks(1, sft_step, ParallelLayout(1))[0][1]
    arch = ARCHS["qwen2"]
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_heads,
            num_key_value_heads=arch.num_kv_heads,
            rms_norm_eps=arch.rms_norm_eps,
            **both_spellings({"rope_type": "default", "rope_theta": arch.rope_theta}),
            tie_word_embeddings=True,
        )
    ).double()
    model.load_state_dict({**weights, "lm_head.weight": weights[EMBEDDING]})
    batch = make_batch()
    loss = torch.zeros((), dtype=torch.float64)
    weights_R = batch.weights_R.split(batch.response_lens_B.tolist())
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    for tokens, prompt_len, weight_R in zip(sequences, batch.prompt_lens_B.tolist(), weights_R, strict=True):
        logprobs = model(tokens[None]).logits[0, prompt_len - 1 : -1].log_softmax(-1)
        loss = loss - (logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1) * weight_R).sum()
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    return float(loss.detach()), norm


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_are_those_of_transformers(layout, by_transformers):
    """Each parameter counts once: neither replicas over ranks nor the tied output layer of the last stage."""
    loss, norm = by_transformers
    for metrics, _ in run_ranks(LAYOUTS[layout].world_size, sft_step, LAYOUTS[layout]):
        assert math.isclose(metrics["actor/nll"], loss, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/grad_norm"], norm, rel_tol=RELATIVE)


@pytest.mark.parametrize("rollout", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}], ids=str)
def test_a_supervised_loss_is_that_of_the_whole_distribution_whatever_is_sampled_from(rollout, by_transformers):
    loss, norm = by_transformers
    for metrics, _ in run_ranks(2, sft_step, LAYOUTS["tp2"], rollout):
        assert math.isclose(metrics["actor/nll"], loss, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/grad_norm"], norm, rel_tol=RELATIVE)


def swap(grid):
    policy = make_policy(ARCHS["qwen2"], grid)
    untouched = not policy._reference
    batch = make_batch(5)
    train(policy, 1)
    before = {name: tensor.clone() for name, tensor in policy.named_tensors().items()}
    actor = scores(policy, batch)
    other = make_policy(ARCHS["qwen2"], grid, seed=99, groups=policy._groups)
    expected = scores(other, batch)
    for name, tensor in other.named_tensors().items():
        policy.reference_tensors()[name].copy_(tensor)
    with policy.using_reference():
        inside = scores(policy, batch)
    after = scores(policy, batch)
    try:
        with policy.using_reference():
            raise KeyError("inside")
    except KeyError:
        pass
    kept = all(torch.equal(before[name], tensor) for name, tensor in policy.named_tensors().items())
    stepped = train(policy, 1, first=1)[0]
    return (
        untouched,
        kept,
        torch.equal(actor, after),
        torch.equal(inside, expected),
        torch.equal(inside, actor),
        stepped,
    )


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "pp2_vpp2"])
def test_the_reference_scores_in_the_actors_modules_and_leaves_no_trace(layout, single):
    for untouched, kept, same, as_other, as_actor, stepped in run_ranks(
        LAYOUTS[layout].world_size, swap, LAYOUTS[layout]
    ):
        assert untouched, "nothing is allocated before it is asked for"
        assert kept
        assert same
        assert as_other
        assert not as_actor
        expected = single("qwen2")[0][1]
        assert math.isclose(stepped["actor/grad_norm"], expected["actor/grad_norm"], rel_tol=RELATIVE)


def no_reference():
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1))
    with pytest.raises(RuntimeError, match="no reference"), policy.using_reference():
        pass
    with pytest.raises(RuntimeError, match="start_optimizer"):
        policy.update(make_batch(), algorithm())


def test_what_was_not_set_up_is_named():
    run_ranks(1, no_reference)


def restarted(grid):
    policy = make_policy(ARCHS["qwen2"], grid)
    train(policy, 2)
    kept = {name: tensor.clone() for name, tensor in policy.named_tensors().items()}
    policy.start_optimizer(CONSTANT)
    first = train(policy, 1, first=2)
    fresh = make_policy(ARCHS["qwen2"], grid, seed=None, groups=policy._groups)
    fresh.start_optimizer(CONSTANT)  # before the weights are there
    for name, tensor in fresh.named_tensors().items():
        tensor.copy_(kept[name])
    fresh.weights_changed()
    second = train(fresh, 1, first=2)
    ours, theirs = policy.named_tensors(), fresh.named_tensors()
    return first == second, all(torch.equal(ours[name], theirs[name]) for name in ours), policy.num_updates


@pytest.mark.parametrize("layout", ["single", "tp2", "dp2"])
def test_a_new_optimizer_remembers_nothing_and_takes_weights_from_outside(layout):
    for result in run_ranks(LAYOUTS[layout].world_size, restarted, LAYOUTS[layout]):
        assert result == (True, True, 1)


def exploding(grid):
    policy = make_policy(ARCHS["qwen2"], grid)
    policy.start_optimizer(CONSTANT)
    batch = own_part(make_batch(), policy)
    batch.weights_R[:] = torch.inf
    with pytest.raises(UserError, match="gradient norm is"):
        policy.update(batch, algorithm())


def test_a_gradient_that_is_not_finite_ends_the_run():
    run_ranks(2, exploding, LAYOUTS["tp2"])


def warmed_up():
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1))
    rate = LearningRate(1e-3, 1e-4, "linear", 2, 5)
    return [metrics["actor/lr"] for metrics in train(policy, 5, rate=rate)], [rate.at(step) for step in range(5)]


def test_the_learning_rate_is_the_schedules():
    used, expected = run_ranks(1, warmed_up)[0]
    assert used == expected


def decayed(weight_decay):
    arch = replace(ARCHS["qwen2"], num_layers=2)
    policy = make_policy(arch, ParallelLayout(1), actor={"weight_decay": weight_decay})
    before = full_weights(policy)
    policy.start_optimizer(CONSTANT)
    batch = make_batch()
    batch.advantages_R.zero_()
    policy.update(batch, build(AlgorithmConfig(name="grpo"), RolloutConfig(n=2)))
    return before, full_weights(policy)


def test_weight_decay_is_decoupled_and_spares_norms_and_biases():
    """Without a gradient, a step multiplies matrices by 1 - lr x decay and leaves vectors."""
    before, after = run_ranks(1, decayed, 0.5)[0]
    for name, weight in after.items():
        factor = 1 - CONSTANT.peak * 0.5 if weight.dim() == 2 else 1.0
        torch.testing.assert_close(weight, before[name] * factor, rtol=PARAMETER_NORM, atol=0, msg=name)
