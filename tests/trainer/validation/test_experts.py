"""Layouts and settings that do not fit a mixture of experts, or a model without one, are refused with the reason."""

import pytest

from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.validate import check
from tests.trainer.validation.runs import ARCH, make, refusal

MIXTURE = arch_from_preset("qwen3_moe_tiny", {}, None)
"""4 layers, 4 heads, 4 experts of width 64, two for each token."""
TP, SP = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel=true"
PP, EP = "parallel.pipeline_model_parallel_size", "parallel.expert_model_parallel_size"
ETP, CP = "parallel.expert_tensor_parallel_size", "parallel.context_parallel_size"
ROLLOUT_TP, ROLLOUT_EP = "rollout.tensor_model_parallel_size", "rollout.expert_parallel_size"
R2, DECOUPLED, T = (
    "actor.router_replay=recompute",
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "megatron.transformer",
)
MOE_TP, RECORD = "rollout.moe_tensor_parallel_size", "rollout.enable_rollout_routing_replay=true"

RULES = [
    # overrides, ranks, what the message says
    ([f"{TP}=2"], 2, f"{TP}=2 with an MoE model needs parallel.sequence_parallel=true"),
    ([f"{TP}=2", SP, f"{ETP}=1"], 2, f"{ETP}=1 differs from {TP}=2, which needs {EP} above 1"),
    ([f"{EP}=4", f"{PP}=2"], 4, f"{EP}=4 x {ETP}=1 = 4 does not divide the 2 rank(s) of a pipeline stage"),
    ([f"{EP}=4", f"{PP}=2"], 4, "--nproc-per-node 8"),
    ([f"{EP}=2", f"{ETP}=3"], 2, f"{EP}=2 x {ETP}=3 = 6 does not divide the 2 rank(s)"),
    ([f"{EP}=8"], 8, f"{EP}=8 does not divide the model's experts (4)"),
    ([f"{EP}=2", f"{ETP}=3"], 6, f"{ETP}=3 does not divide the model's moe_intermediate_size (64)"),
    (["actor.moe_token_dispatcher_type=allgather", f"{PP}=2"], 2, f"allgather is not supported with {PP}=2"),
    (["actor.moe_token_dispatcher_type=allgather", f"{CP}=2"], 2, f"allgather is not supported with {CP}=2"),
    (["actor.moe_aux_loss_coeff=0.01"], 1, "moe_router_load_balancing_type=none with actor.moe_aux_loss_coeff=0.01"),
    (["actor.moe_router_load_balancing_type=aux_loss"], 1, "with actor.moe_aux_loss_coeff=0.0 has no effect"),
    ([f"{ROLLOUT_EP}=2"], 1, f"{ROLLOUT_EP}=2 does not make up {ROLLOUT_TP}=1"),
    ([f"{ROLLOUT_TP}=4", f"{ROLLOUT_EP}=3"], 4, f"{ROLLOUT_EP}=3 does not make up {ROLLOUT_TP}=4"),
    ([f"{ROLLOUT_TP}=4", f"{ROLLOUT_EP}=2", f"{MOE_TP}=1"], 4, f"=2 x {MOE_TP}=1 does not make up {ROLLOUT_TP}=4"),
    ([f"{ROLLOUT_TP}=2", f"{MOE_TP}=1"], 2, f"{ROLLOUT_EP}=1 x {MOE_TP}=1 does not make up {ROLLOUT_TP}=2"),
    ([f"{ROLLOUT_TP}=8", f"{ROLLOUT_EP}=8"], 8, f"{ROLLOUT_EP}=8 does not divide the model's experts (4)"),
    (["actor.router_replay=rollout"], 1, "needs rollout.enable_rollout_routing_replay=true"),
    ([RECORD], 1, "would have no effect because actor.router_replay is none"),
    ([RECORD, R2, DECOUPLED], 1, "would have no effect because actor.router_replay is recompute"),
    ([R2], 1, "which algorithm.rollout_correction.bypass_mode=true skips. Set bypass_mode to false"),
    ([R2, DECOUPLED, f"{T}={{moe_router_fusion: true}}"], 1, "actor.router_replay must be none"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size, MIXTURE)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([f"{EP}=2"], 2),
        ([f"{TP}=2", SP, f"{EP}=2", f"{ETP}=1"], 2),
        ([f"{TP}=2", SP, f"{EP}=2", f"{PP}=2"], 8),
        (["actor.moe_token_dispatcher_type=allgather", f"{EP}=4"], 4),
        (["actor.moe_router_load_balancing_type=aux_loss", "actor.moe_aux_loss_coeff=0.01"], 1),
        ([f"{ROLLOUT_TP}=4", f"{ROLLOUT_EP}=2"], 4),
        ([f"{ROLLOUT_TP}=4", f"{ROLLOUT_EP}=2", f"{MOE_TP}=2"], 4),
        ([f"{ROLLOUT_TP}=2", f"{MOE_TP}=2"], 2),
        ([RECORD, "actor.router_replay=rollout"], 1),
        ([R2, DECOUPLED], 1),
        ([R2, DECOUPLED, f"{TP}=2", SP, f"{EP}=2", f"{PP}=2"], 8),
    ],
)
def test_layouts_that_work_pass(overrides, world_size):
    check(make(*overrides), MIXTURE, world_size, tokenizer_vocab_size=12)


@pytest.mark.parametrize(("replay", "more"), [("rollout", [RECORD]), ("recompute", [])])
def test_replay_is_refused_where_nothing_is_sampled(replay, more):
    replays = make(*more, f"actor.router_replay={replay}", "algorithm.name=sft")
    with pytest.raises(UserError, match=f"router_replay={replay} would have no effect because algorithm.name=sft"):
        check(replays, MIXTURE, 1, tokenizer_vocab_size=12, learns_from="responses")


IDLE = [
    f"{EP}=2",
    f"{ETP}=2",
    "actor.router_replay=rollout",
    R2,
    "rollout.expert_parallel_size=2",
    "rollout.moe_tensor_parallel_size=2",
    "rollout.enable_rollout_routing_replay=True",
    "actor.moe_router_dtype=fp64",
    "actor.moe_token_dispatcher_type=allgather",
    "actor.moe_router_load_balancing_type=aux_loss",
    "actor.moe_aux_loss_coeff=0.1",
    "actor.moe_z_loss_coeff=0.1",
]


@pytest.mark.parametrize("override", IDLE)
def test_a_dense_model_refuses_what_only_experts_use(override):
    assert f"{override} is set, but would have no effect" in refusal(make(override), 4, ARCH)


SINKS = arch_from_preset("gpt_oss_tiny", {}, None)


def test_experts_with_biases_are_not_split():
    assert f"{ETP}=2: this model's experts have biases" in refusal(make(f"{TP}=2", SP, f"{EP}=2"), 4, SINKS)
    check(make(f"{TP}=2", SP, f"{EP}=2", f"{ETP}=1"), SINKS, world_size=2, tokenizer_vocab_size=12)
