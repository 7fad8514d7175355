"""What an update scores itself is, in every bit, what a pass before it gives: in every layout, with experts too."""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms._distillation import Distillation
from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, DistillationLossConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.megatron.distillation_targets import DistillationSpec
from mrl.resharding.megatron import output_name
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    make_batch,
    make_policy,
    own_part,
)
from tests.ranks import run_ranks

UPDATES = 2
"""On the same samples: the second has the log-probabilities from before the first."""
CASES = {
    **{f"qwen2 {name}": ("qwen2", grid, {}) for name, grid in LAYOUTS.items()},
    "qwen3 cp2": ("qwen3", CONTEXT_LAYOUTS["cp2"], {}),
    "recomputed": ("llama", LAYOUTS["pp2"], {"actor": {"recompute": "full"}}),
    "each by itself, bf16": ("qwen2", LAYOUTS["tp2"], {"dtype": "bfloat16", "actor": {"use_prefix_grouper": False}}),
    "true on-policy": ("qwen2", LAYOUTS["tp2"], {"rollout": {"true_on_policy": True}}),
    "experts": ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2"], {"actor": {"moe_token_dispatcher_type": "allgather"}}),
    "experts over stages": ("qwen3_moe", EXPERT_LAYOUTS["ep2_pp2"], {}),
    "distilled": ("qwen2", LAYOUTS["tp2"], {}),
}


def objective():
    """Reads both log-probabilities, those of the reference in the loss."""
    correction = RolloutCorrectionConfig(preset="decoupled_seq_is_rs")
    config = AlgorithmConfig(name="grpo", kl_in="loss", kl_coef=0.1, entropy_coef=0.01, rollout_correction=correction)
    return build(config, RolloutConfig(n=2))


def updated(name, arch, grid, options, *, before):
    """Metrics and weights of updates with passes before them, or without."""
    policy, algorithm = make_policy(arch, grid, **options), objective()
    policy.start_optimizer(CONSTANT)
    policy.copy_to_reference()
    batch = own_part(make_batch(), policy)
    batch.rollout_logprobs_R = policy.score(batch)[0]
    if not options.get("rollout"):
        batch.rollout_logprobs_R = (
            batch.rollout_logprobs_R
            + 0.1 * torch.sin(torch.arange(batch.tokens_P.numel()))[: batch.response_mask_R.numel()]
        )
    if name == "distilled":
        loss = DistillationLossConfig(loss_mode="reverse_kl")
        policy._distillation = Distillation(loss)
        batch.teacher_B = torch.zeros(batch.num_sequences, dtype=torch.int64)
        batch.teacher_states_R = policy.final_hidden_states(batch)
        named = policy.named_tensors()
        policy.distillation = DistillationSpec(loss, 1.0, 16, [named[output_name(named)].clone()])
    if before:
        batch.proximal_logprobs_R, _ = policy.score_proximal(batch)
        with policy.using_reference():
            batch.ref_logprobs_R, _ = policy.score(batch)
    metrics = [policy.update(batch, algorithm, is_first_update=not index) for index in range(UPDATES)]
    return metrics, {name: tensor.clone() for name, tensor in policy.named_tensors().items()}


def both(name, arch, grid, options):
    found = [updated(name, arch, grid, options, before=before) for before in (False, True)]
    (own, ours), (passed, theirs) = found
    return (own, passed), all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.compiler) if case == "true on-policy" else case for case in CASES]
)
def test_an_update_without_passes_before_it_is_that_with_them(case):
    name, grid, options = CASES[case]
    arch = replace({**ARCHS, **MIXTURES}[name], num_layers=4 if grid.vpp > 1 else 2)
    for (own, passed), same in run_ranks(grid.world_size, both, case, arch, grid, options):
        assert own == passed and same
        assert own[0]["actor/kl_loss"] == 0 < own[1]["actor/kl_loss"], (
            "the second is held to the weights before the first"
        )
        assert own[0]["actor/ratio_max"] == own[0]["actor/ratio_min"] == 1 != own[1]["actor/ratio_max"]


def told():
    """Whether the actor scores as the reference, as time goes on; what then is left to its update."""
    policy, algorithm, batch = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"]), objective(), make_batch()
    batch = own_part(batch, policy)
    policy.start_optimizer(CONSTANT)
    at = {"at first": policy.logprobs_from_update(algorithm)}
    for name, tensor in policy.named_tensors().items():
        policy.reference_tensors()[name].copy_(tensor)
    at["filled"] = policy.logprobs_from_update(algorithm)
    policy.compare_reference()
    at["compared"] = policy.logprobs_from_update(algorithm)
    policy.update(batch, algorithm, is_first_update=True)
    at["updated"] = policy.logprobs_from_update(algorithm)
    policy.copy_to_reference()
    at["taken"] = policy.logprobs_from_update(algorithm)
    policy.weights_changed()
    at["written to"] = policy.logprobs_from_update(algorithm)
    if torch.distributed.get_rank() == 1:
        policy.reference_tensors()["chunk0.decoder.final_layernorm.weight"][0] += 1
    policy.compare_reference()
    at["other on one rank"] = policy.logprobs_from_update(algorithm)
    return at


def test_the_reference_is_the_actor_until_one_of_them_changes():
    own, both = ["proximal_logprobs_R"], ["proximal_logprobs_R", "ref_logprobs_R"]
    expected = {
        "at first": own,
        "filled": own,
        "compared": both,
        "updated": own,
        "taken": both,
        "written to": own,
        "other on one rank": own,
    }
    assert run_ranks(2, told) == [expected] * 2


def replayed(replay):
    policy = make_policy(MIXTURES["qwen3_moe"], LAYOUTS["single"], actor={"router_replay": replay})
    policy.copy_to_reference()
    return policy.logprobs_from_update(objective()), policy.equals_reference


def test_replayed_routes_are_not_the_references():
    """rollout: the actor's tokens go elsewhere; recompute: the pass before the update says where they go."""
    assert run_ranks(1, replayed, "rollout") == [(["proximal_logprobs_R"], False)]
    assert run_ranks(1, replayed, "recompute") == [([], True)]
