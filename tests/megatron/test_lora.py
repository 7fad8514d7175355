"""Low-rank adapters: forward, gradients and updates are those of transformers with merged weights, in every layout."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, LoraConfig, RolloutConfig
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf_names import join, written_together
from mrl.resharding.lora import first_expert
from tests.megatron.actors import (
    ARCHS,
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    fill_adapters,
    full_adapters,
    full_weights,
    make_batch,
    make_policy,
    own_part,
    scores,
    train,
)
from tests.megatron.trainings import ABSOLUTE, RELATIVE, WEIGHTS
from tests.ranks import run_ranks

RANK, ALPHA = 3, 12.0
LORA = LoraConfig(rank=RANK, alpha=ALPHA)
PREFIX = "base_model.model."
STEPS = 2


def adapted(arch, grid, lora=LORA, *, actor=None, **options):
    """Collective over the job: an actor with large random adapters."""
    policy = make_policy(arch, grid, actor={"lora": lora, **(actor or {})}, **options)
    fill_adapters(policy)
    return policy


def supervised():
    return build(AlgorithmConfig(name="sft"), RolloutConfig(n=1))


def one_step(arch, grid, lora, options):
    """Weights, adapters, scores with and without adapters, and the gradient of a supervised step."""
    policy = adapted(arch, grid, lora, actor={"use_distributed_optimizer": False, "clip_grad": 0.0, **options})
    batch = make_batch()
    scored = scores(policy, batch)
    with policy.adapters.disabled():
        plain = scores(policy, batch)
    weights, adapters = full_weights(policy), full_adapters(policy)
    policy.start_optimizer(train.__globals__["CONSTANT"])
    policy.update(own_part(batch, policy), supervised())
    frozen = [each for c in policy.chunks for name, each in c.named_parameters() if "lora_" not in name]
    assert not any(each.requires_grad or getattr(each, "main_grad", None) is not None for each in frozen)
    return weights, adapters, scored[0], plain[0], full_adapters(policy, gradients=True)


def merged(weights, adapters, scale):
    """W + scale lora_B lora_A, differentiable in the adapters."""
    found = {}
    for name, weight in weights.items():
        module = PREFIX + name.removesuffix(".weight")
        a, b = adapters.get(f"{module}.lora_A.weight"), adapters.get(f"{module}.lora_B.weight")
        found[name] = weight.double() if a is None else weight.double() + scale * b @ a
    return found


def by_transformers(arch, weights, batch):
    """Log-probabilities [R] of transformers' model with these weights, fp64."""
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = (
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        .double()
        .eval()
    )
    together = written_together(arch)
    own = dict(join(weights.items(), together)) if together else fused_experts(model, weights)
    if arch.tie_word_embeddings:
        own["lm_head.weight"] = own["model.embed_tokens.weight"]
    parts, start = [], 0
    for prompt, response in zip(batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist(), strict=True):
        tokens = batch.tokens_P[start : start + prompt + response]
        start += prompt + response
        logits = torch.func.functional_call(model, own, (tokens[None],), tie_weights=False).logits[0]
        logprobs = logits.log_softmax(-1)[prompt - 1 : -1]
        parts.append(logprobs.gather(1, tokens[prompt:, None]).squeeze(1))
    return torch.cat(parts)


def fused_experts(model, weights):
    """Weights by the names of transformers 5, in which the experts of a layer are one tensor."""
    own, experts = {}, {}
    for name, weight in weights.items():
        layer, _, rest = name.partition(".experts.")
        if rest:
            number, _, which = rest.partition(".")
            experts.setdefault(layer, {}).setdefault(which.removesuffix(".weight"), {})[int(number)] = weight
        else:
            own[name] = weight
    names = model.state_dict().keys()
    for layer, found in experts.items():
        block = layer.replace("block_sparse_moe", "mlp")
        gate, up, down = [
            found[key] for key in (("w1", "w3", "w2") if "w1" in found else ("gate_proj", "up_proj", "down_proj"))
        ]
        own[f"{block}.experts.gate_up_proj"] = torch.stack([torch.cat([gate[i], up[i]]) for i in sorted(gate)])
        own[f"{block}.experts.down_proj"] = torch.stack([down[i] for i in sorted(down)])
    own = {name.replace("block_sparse_moe.", "mlp."): weight for name, weight in own.items()}
    assert own.keys() <= names, own.keys() - names
    return own


def check(arch, grid, lora=LORA, options=None, scale=ALPHA / RANK):
    (weights, adapters, scored, plain, gradients), *_ = run_ranks(
        grid.world_size, one_step, arch, grid, lora, options or {}
    )
    batch = make_batch()
    leaves = {name: tensor.double().requires_grad_() for name, tensor in adapters.items()}
    expected = by_transformers(arch, merged(weights, leaves, scale), batch)
    torch.testing.assert_close(scored.double(), expected.detach(), rtol=0, atol=2e-5)
    base = by_transformers(arch, {name: w.double() for name, w in weights.items()}, batch).detach()
    torch.testing.assert_close(plain.double(), base, rtol=0, atol=2e-5)
    assert (base - expected.detach()).abs().max() > 0.2
    (-(batch.weights_R * expected).sum()).backward()
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        scale_of_grad = float(leaf.grad.abs().max())
        torch.testing.assert_close(
            gradients[name].double(), leaf.grad, rtol=0, atol=1e-5 * max(1.0, scale_of_grad), msg=name
        )


@pytest.mark.parametrize("family", [*ARCHS, *(name for name, arch in MIXTURES.items() if arch.mla is None)])
def test_scores_and_gradients_are_those_of_transformers_with_merged_weights(family):
    check({**ARCHS, **MIXTURES}[family], ParallelLayout(1))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_layouts(layout):
    check(ARCHS["qwen2"], LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["cp2", "cp2_tp2", "cp2_pp2"])
def test_context_parallel_layouts(layout):
    check(ARCHS["qwen3"], CONTEXT_LAYOUTS[layout])


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_expert_layouts(layout):
    check(MIXTURES["qwen2_moe"], EXPERT_LAYOUTS[layout])


def trained(arch, grid, options):
    policy = adapted(arch, grid, **options)
    before = full_weights(policy)
    metrics = train(policy, STEPS)
    after = full_weights(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return metrics, full_adapters(policy)


def run(arch, grid, **options):
    first, *others = run_ranks(grid.world_size, trained, arch, grid, options)
    assert all(metrics == first[0] for metrics, _ in others)
    return first


@pytest.fixture(scope="module")
def single():
    known = {}
    return lambda name: known.setdefault(name, run({**ARCHS, **MIXTURES}[name], ParallelLayout(1)))


def assert_same(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), (
                key,
                ours[key],
                theirs[key],
            )
    assert found[1].keys() == expected[1].keys()
    for key, adapter in found[1].items():
        torch.testing.assert_close(adapter, expected[1][key], rtol=0, atol=WEIGHTS, msg=key)


UPDATES = [
    ("qwen2", "tp2", {}),
    ("qwen2", "tp2", {"parallel": {"sequence_parallel": False}}),
    ("qwen2_untied", "tp2_pp2", {}),
    ("qwen2", "dp2", {}),
    ("qwen2", "dp2", {"actor": {"use_distributed_optimizer": False}}),
    ("qwen2", "dp2", {"actor": {"overlap_grad_reduce": True}}),
    ("qwen2", "dp2", {"megatron": {"ddp": {"overlap_param_gather": True}}, "actor": {"overlap_grad_reduce": True}}),
    ("qwen2", "single", {"actor": {"recompute": "full"}}),
    ("qwen2", "single", {"actor": {"recompute": "selective"}}),
    ("qwen2", "tp2", {"actor": {"recompute": "full"}}),
    ("qwen2", "pp2_vpp2", {"actor": {"recompute": "full"}}),
]


@pytest.mark.parametrize(("name", "layout", "options"), UPDATES, ids=str)
def test_updates_are_those_of_the_single_process_and_leave_the_model_alone(name, layout, options, single):
    assert_same(run(ARCHS[name], LAYOUTS[layout], **options), single(name))


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "tp2_ep2_etp2", "ep2_pp2"])
def test_updates_of_experts(layout, single):
    assert_same(run(MIXTURES["qwen2_moe"], EXPERT_LAYOUTS[layout]), single("qwen2_moe"))


SHARED = replace(LORA, share_expert_adapters=True)


@pytest.fixture(scope="module")
def sharing():
    return run(MIXTURES["qwen2_moe"], ParallelLayout(1), lora=SHARED)


@pytest.mark.parametrize(("layout", "actor"), [
    ("tp2_ep2", {}), ("tp2_ep2_etp2", {}), ("ep2_pp2", {}), ("ep2_dp2", {"overlap_grad_reduce": True}),
    ("ep2_dp2", {"use_distributed_optimizer": False}),
], ids=str)  # fmt: skip
def test_updates_of_adapters_that_experts_share(layout, actor, sharing):
    found = run(MIXTURES["qwen2_moe"], EXPERT_LAYOUTS[layout], lora=SHARED, actor=actor)
    assert_same(found, sharing)
    assert all(torch.equal(tensor, found[1][first_expert(name)]) for name, tensor in found[1].items())
