"""Balancing losses and measures of the load are those of a dense reference, at every layout."""

import math

import pytest
import torch

from mrl.algorithms._critic import ValueObjective
from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, CriticConfig, RolloutConfig
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    BIASED_MIXTURE,
    CONSTANT,
    EXPERT_LAYOUTS,
    full_weights,
    make_batch,
    make_critic,
    make_policy,
    own_part,
)
from tests.megatron.mixtures import by_hand, load_model, make_model
from tests.ranks import run_ranks

RELATIVE = 1e-4  # fp32 against fp64
VISIBLE = 0.01  # each loss changes the gradient norm by more than this
AUX, Z = 10.0, 1.0  # large, so that the gradient norm shows each
BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": AUX,
    "moe_z_loss_coeff": Z,
    "max_tokens_per_microbatch": 10_000,
    "clip_grad": 0.0,
}
LAYOUTS = {"single": ParallelLayout(1), "ep1_dp2": ParallelLayout(2), **EXPERT_LAYOUTS}
DP2_CUT = 3
"""Where `own_part` cuts 14 sequences for two data-parallel ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("qwen2_moe")
    make_model("qwen2_moe", seed=5).save_pretrained(found)
    return str(found)


@pytest.fixture(scope="module")
def reference(folder):
    """(cuts, coefficients) -> by_hand."""
    known = {}

    def find(cuts, aux, z):
        key = (cuts, aux, z)
        if key not in known:
            model = load_model(folder, "qwen2_moe")
            known[key] = by_hand(model, make_batch(), aux_coeff=aux, z_coeff=z, cuts=cuts)
        return known[key]

    return find


def step(folder, grid, actor):
    """Metrics of one supervised update."""
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None, actor=actor)
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    policy.start_optimizer(CONSTANT)
    return policy.update(own_part(make_batch(), policy), build(AlgorithmConfig(name="sft"), RolloutConfig()))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        *(
            (layout, {})
            for layout in ("single", "tp2", "tp2_ep2", "ep2", "ep1_dp2", "ep2_pp2", "tp2_ep2_etp2", "cp2_ep2")
        ),
        ("ep2", {"moe_token_dispatcher_type": "allgather"}),
        ("tp2_ep2_pp2", {"recompute": "full"}),
    ],
    ids=str,
)
def test_losses_gradient_and_load_are_the_references(layout, more, folder, reference):
    """Neither filling, shared prompts, recomputation nor the ranks that share a microbatch count twice."""
    grid = LAYOUTS[layout]
    expected = reference((DP2_CUT,) if grid.dp == 2 else (), AUX, Z)
    unevenness = expected.load_LE.max(1).values / expected.load_LE.mean(1)
    values = {
        "actor/nll": expected.nll,
        "actor/grad_norm": expected.grad_norm,
        "actor/moe_aux_loss": expected.aux,
        "actor/moe_z_loss": expected.z,
        "actor/moe_router_entropy": expected.entropy,
        "actor/moe_load_max_over_mean": float(unevenness.mean()),
        "actor/moe_load_max_over_mean/worst": float(unevenness.max()),
    }
    for metrics in run_ranks(grid.world_size, step, folder, grid, {**BALANCED, **more}):
        for key, value in values.items():
            assert math.isclose(metrics[key], value, rel_tol=RELATIVE), (key, metrics[key], value)


def test_without_losses_the_gradient_has_none_of_them(folder, reference):
    plain = {"max_tokens_per_microbatch": 10_000, "clip_grad": 0.0}
    expected = reference((), 0.0, 0.0)
    for metrics in run_ranks(2, step, folder, EXPERT_LAYOUTS["tp2_ep2"], plain):
        assert math.isclose(metrics["actor/grad_norm"], expected.grad_norm, rel_tol=RELATIVE)
        assert not {"actor/moe_aux_loss", "actor/moe_z_loss"} & metrics.keys()
    for aux, z in ((AUX, 0.0), (0.0, Z)):
        assert not math.isclose(expected.grad_norm, reference((), aux, z).grad_norm, rel_tol=VISIBLE)


@pytest.mark.parametrize("aux", [0.0, AUX])
def test_one_expert_with_weight_1_learns_from_the_losses_alone(aux, tmp_path):
    """Its router has no other gradient: the probability of the one chosen expert is scaled to 1."""
    make_model("mixtral", seed=6, num_experts_per_tok=1).save_pretrained(tmp_path)
    expected = by_hand(load_model(str(tmp_path), "mixtral"), make_batch(), aux_coeff=aux, cuts=(DP2_CUT,))
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": aux} if aux else {}
    actor = {"max_tokens_per_microbatch": 10_000, "clip_grad": 0.0, **losses}
    for metrics in run_ranks(2, step, str(tmp_path), EXPERT_LAYOUTS["ep2"], actor):
        assert math.isclose(metrics["actor/grad_norm"], expected.grad_norm, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/nll"], expected.nll, rel_tol=RELATIVE)


def value_step(folder, grid):
    """Metrics of an update of a critic whose values are right: nothing but the losses of its routers is left."""
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None)
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    critic = make_critic(arch, grid, seed=None, groups=policy._groups, actor=BALANCED)
    critic.init_from_actor(policy.named_tensors())
    critic.start_optimizer(CONSTANT)
    batch = own_part(make_batch(), critic)
    batch.values_R = batch.returns_R = critic.values(batch)
    return critic.update(batch, ValueObjective(CriticConfig(), RolloutConfig()).loss)


@pytest.mark.parametrize("layout", ["single", "tp2_ep2", "ep2_pp2"])
def test_a_critic_learns_from_its_routers_losses_too(layout, folder):
    batch = make_batch()
    batch.weights_R = torch.zeros_like(batch.weights_R)
    cuts = (DP2_CUT,) if LAYOUTS[layout].dp == 2 else ()
    expected = by_hand(load_model(folder, "qwen2_moe"), batch, aux_coeff=AUX, z_coeff=Z, cuts=cuts)
    for metrics in run_ranks(LAYOUTS[layout].world_size, value_step, folder, LAYOUTS[layout]):
        assert metrics["critic/vf_loss"] == 0
        assert math.isclose(metrics["critic/grad_norm"], expected.grad_norm, rel_tol=RELATIVE)
        assert math.isclose(metrics["critic/moe_aux_loss"], expected.aux, rel_tol=RELATIVE)
        assert math.isclose(metrics["critic/moe_z_loss"], expected.z, rel_tol=RELATIVE)


RATE = 0.125


def biased_step(grid):
    """Biases before and after an update, the tokens of each expert in its forward pass, and the metrics."""
    actor = {"moe_router_bias_update_rate": RATE, "router_replay": "recompute", "max_tokens_per_microbatch": 10_000}
    policy = make_policy(BIASED_MIXTURE, grid, actor=actor)
    for name, tensor in policy.named_tensors().items():
        if "expert_bias" in name:
            tensor.copy_(torch.linspace(-0.2, 0.3, tensor.numel()))
    before = biases(policy)
    policy.start_optimizer(CONSTANT)
    policy.copy_to_reference()
    batch = own_part(make_batch(), policy)
    policy.score_proximal(batch)
    chosen_PLK = batch.routed_experts_P
    metrics = policy.update(batch, build(AlgorithmConfig(name="sft"), RolloutConfig()))
    with policy.using_reference():
        of_reference = biases(policy)
    assert all(torch.equal(of_reference[name], before[name]) for name in before)
    return before, biases(policy), chosen_PLK, metrics


def biases(policy):
    return {name: value.clone() for name, value in full_weights(policy).items() if "correction_bias" in name}


def test_biases_move_against_the_load_alike_at_every_layout():
    before, after, chosen_PLK, metrics = run_ranks(1, biased_step, ParallelLayout(1))[0]
    assert len(after) == len(BIASED_MIXTURE.moe_layers) == chosen_PLK.size(1)
    for number, layer in enumerate(BIASED_MIXTURE.moe_layers):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        chosen = chosen_PLK[:, number][chosen_PLK[:, number] >= 0].long()
        load = torch.bincount(chosen, minlength=BIASED_MIXTURE.moe.num_experts).double()
        assert torch.equal(after[name] - before[name], RATE * (load.mean() - load).sign().float())
        assert load.max() > load.min()
    largest = max(float(value.abs().max()) for value in after.values())
    assert math.isclose(metrics["actor/moe_router_bias_max"], largest, rel_tol=1e-6)
    for layout in ("ep2", "tp2_ep2", "ep2_pp2"):
        for _, found, _, others in run_ranks(LAYOUTS[layout].world_size, biased_step, LAYOUTS[layout]):
            assert all(torch.equal(found[name], after[name]) for name in after), layout
            assert math.isclose(others["actor/moe_router_bias_max"], largest, rel_tol=1e-6)
