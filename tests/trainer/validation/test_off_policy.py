"""Sampling ahead of the updates, or beyond a batch, is refused where it cannot be or would have no effect."""

from dataclasses import replace

import pytest

from mrl.trainer.validation.off_policy import ASYNC_PRESET, with_async_correction
from mrl.trainer.validation.validate import check_config
from tests.trainer.validation.runs import make, refusal

ASYNC, OVER = "train.mode=async", "rollout.over_sample_rate=0.5"
MORE = "rollout.over_sample_rate=1.5"
TALK = ("rollout.multi_turn.enable=true", "rollout.agent.environment=guess")
REPLAY = ("rollout.enable_rollout_routing_replay=true", "actor.router_replay=rollout")

RULES = [
    # overrides, what the message says
    ([ASYNC, OVER], "rollout.over_sample_rate=0.5 is not supported with train.mode=async"),
    (["train.max_off_policy_steps=1"], "train.mode is sync and rollout.over_sample_rate is 0"),
    (
        ["rollout.over_age=drop"],
        "because rollout.over_sample_rate is 0. Remove it, or set rollout.over_sample_rate.",
    ),
    ([ASYNC, "rollout.over_age=drop"], "or use train.mode=sync with a rollout.over_sample_rate"),
    ([OVER, "rollout.over_age=drop"], "Remove it, or set train.max_off_policy_steps, for example to 1."),
    (["rollout.mask_offpolicy=true"], "no response has tokens of two policy versions"),
    ([ASYNC, "rollout.mask_offpolicy=true"], "no response has tokens of two policy versions"),
    ([OVER, "train.max_off_policy_steps=0"], "each step would wait for all"),
    ([OVER, *TALK], "a conversation cannot be continued later"),
    (
        [OVER, *REPLAY],
        "rollout.over_sample_rate=0.5 is not supported with rollout.enable_rollout_routing_replay",
    ),
    ([ASYNC, "train.max_off_policy_steps=2", *REPLAY], "or set train.max_off_policy_steps=1"),
    ([OVER, "rollout.name=vllm"], "with rollout.name=vllm: the engine cannot pause and resume responses"),
    (["rollout.over_sample_rate=16.5"], "rollout.over_sample_rate=16.5 is out of range; expected [0, 16]"),
    ([MORE, "train.max_off_policy_steps=3"], "more prompts than one batch can reach the maximum age in the same step"),
    (["train.max_off_policy_steps=-1"], "train.max_off_policy_steps=-1 is out of range; expected [0, 1024]"),
]


@pytest.mark.parametrize(("overrides", "said"), RULES, ids=[rule[1] for rule in RULES])
def test_a_broken_rule_is_named(overrides, said):
    assert said in refusal(make(*overrides))


@pytest.mark.parametrize("key", [ASYNC, OVER])
@pytest.mark.parametrize(("algorithm", "learns_from"), [("sft", "answers"), ("dpo", "pairs")])
def test_what_samples_nothing_cannot_sample_ahead(key, algorithm, learns_from):
    said = refusal(make(key, f"algorithm.name={algorithm}"), learns_from=learns_from)
    assert f"{key} would have no effect because algorithm.name={algorithm} does not sample" in said


@pytest.mark.parametrize(
    "overrides",
    [
        [ASYNC],
        [ASYNC, "train.max_off_policy_steps=0"],
        [ASYNC, "train.max_off_policy_steps=4", "rollout.mask_offpolicy=true"],
        [ASYNC, "train.max_off_policy_steps=4", "rollout.name=vllm"],
        [ASYNC, *TALK],
        [ASYNC, "train.max_off_policy_steps=4", *TALK],
        [OVER],
        [MORE],
        ["rollout.over_sample_rate=1", "train.max_off_policy_steps=3"],
        [OVER, "train.max_off_policy_steps=1", "rollout.mask_offpolicy=true"],
        [OVER, "train.max_off_policy_steps=0", "rollout.over_age=drop"],
    ],
    ids=" ".join,
)
def test_what_can_be_is_let_pass(overrides):
    check_config(make(*overrides), world_size=1)


@pytest.mark.parametrize(
    ("overrides", "preset"),
    [
        ([ASYNC], ASYNC_PRESET),
        ([ASYNC, "train.max_off_policy_steps=4"], ASYNC_PRESET),
        ([ASYNC, "algorithm.rollout_correction.preset=null"], ASYNC_PRESET),
        ([ASYNC, "train.max_off_policy_steps=0"], None),
        ([ASYNC, "algorithm.rollout_correction.bypass_mode=true"], None),
        ([ASYNC, "algorithm.rollout_correction.preset=bypass_ppo_clip"], "bypass_ppo_clip"),
        ([ASYNC, "algorithm.rollout_correction.off_policy_mask_threshold=1"], None),
        ([OVER], None),
        ([], None),
    ],
    ids=str,
)
def test_who_samples_ahead_and_asks_for_no_correction_gets_one(overrides, preset):
    found = with_async_correction(make(*overrides))
    assert found.algorithm.rollout_correction.preset == preset
    assert with_async_correction(found) == found


def test_where_only_a_teacher_is_learned_from_nothing_is_weighed():
    config = make(ASYNC)
    loss = replace(config.distillation.distillation_loss, use_task_rewards=False, use_policy_gradient=False)
    config = replace(config, distillation=replace(config.distillation, enabled=True, distillation_loss=loss))
    assert with_async_correction(config) == config
