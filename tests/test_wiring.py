"""Settings reach the place where they act, with the meaning that they say: sampling, the loop, what is kept."""

import math

import pytest

from tests.observed import course, files

EXACT = 1e-9
"""Means of the same fp32 numbers, taken once and several times."""

CHARACTERS = "0123456789<>+#"
"""Of the tokenizer, by token."""

END = len(CHARACTERS) - 1

ONE = ("rollout.n=1", "algorithm.singleton_group=reward")
TO_ONE_TOKEN = {"top_k": "top_k=1", "top_p": "top_p=1e-6", "min_p": "min_p=0.999999"}
"""Each cut so narrow that only the most likely token is left."""


def tokens(*overrides):
    return course(*ONE, *overrides)["1 rollout/token_checksum"]


@pytest.mark.parametrize("cut", TO_ONE_TOKEN)
def test_rollouts_cut_to_one_token_are_greedy_ones(cut):
    greedy = tokens("rollout.do_sample=false")
    assert tokens(f"rollout.{TO_ONE_TOKEN[cut]}") == greedy != tokens()


@pytest.mark.parametrize("cut", [*TO_ONE_TOKEN.values(), "temperature=0", "temperature=1e-5"])
def test_evaluations_cut_to_one_token_are_greedy_ones(cut):
    sampled = "rollout.val_kwargs.do_sample=true"
    greedy = course()["held out"]
    assert course(sampled, f"rollout.val_kwargs.{cut}")["held out"] == greedy != course(sampled)["held out"]


def test_a_cut_of_the_rollouts_is_none_of_the_evaluations():
    sampled = "rollout.val_kwargs.do_sample=true"
    assert course(sampled, "rollout.top_k=1", "rollout.temperature=0.5")["held out"] == course(sampled)["held out"]


def test_evaluations_have_their_own_number_of_samples():
    facts = course("rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.n=2")
    assert len(facts["held out"]) == 6 and "val/reward/mean@2" in facts


def test_with_ignore_eos_every_response_has_its_full_length():
    several = ("rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.n=4")
    free, full = course(*several), course(*several, "rollout.ignore_eos=true")
    assert "stop" in {reason for _, reason in free["held out"]}
    assert free["1 response_length/min"] < 8 == full["1 response_length/min"] == full["1 response_length/max"]
    assert {(len(ids), reason) for ids, reason in full["held out"]} == {(8, "length")}


def test_a_stop_string_ends_rollouts_and_evaluations():
    stop = course("rollout.ignore_eos=true")["held out"][0][0][0]  # the first token of the first greedy answer
    facts = course(f"rollout.stop=['{CHARACTERS[stop]}']")
    assert list(facts["held out"][0]) == [[stop], "stop"]
    for ids, reason in facts["held out"]:
        assert stop not in ids[:-1]
        assert (reason == "stop") == (ids[-1] in (stop, END))
    assert facts["1 response_length/mean"] < course()["1 response_length/mean"]


DYNAMIC = (
    "algorithm.dynamic_sampling=true",
    "reward.functions=[{name: length, kwargs: {target: 1, limit: 2}}]",
    "rollout.response_length=2",
    "data.task_kwargs.num_train=200",
)
"""A group teaches where one of its two responses ends at once and the other does not: one in seven or so."""


def test_dynamic_sampling_drops_groups_and_draws_new_prompts_until_the_batch_is_full():
    facts = course(*DYNAMIC, "algorithm.max_sampling_rounds=50")
    rounds, dropped = facts["1 rollout/num_sampling_rounds"], facts["1 rollout/num_dropped_groups"]
    assert 1 < rounds < 50
    assert facts["position"] - dropped == 4  # groups kept: the whole batch
    assert facts["1 group/zero_variance_frac"] == 0.0
    assert facts["1 critic/advantages/min"] < 0 < facts["1 critic/advantages/max"]


def test_dynamic_sampling_goes_on_with_what_it_has_after_its_last_round():
    whole = course(*DYNAMIC, "algorithm.max_sampling_rounds=50")
    facts = course(*DYNAMIC, "algorithm.max_sampling_rounds=2")
    assert facts["1 rollout/num_sampling_rounds"] == 2.0 < whole["1 rollout/num_sampling_rounds"]
    assert 4 < facts["position"] < whole["position"]
    assert facts["position"] - facts["1 rollout/num_dropped_groups"] < 4


def test_several_passes_over_the_samples_are_so_many_optimizer_steps_in_one_schedule():
    still = ("actor.lr=0",)
    once, thrice = course(*still), course(*still, "actor.ppo_epochs=3")
    assert (once["updates"], thrice["updates"]) == (2, 6)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):  # the weights stay: each pass is the first
        assert math.isclose(once[f"1 {name}"], thrice[f"1 {name}"], rel_tol=EXACT), name
    falling = course("actor.lr_schedule=linear", "actor.ppo_epochs=2")
    assert math.isclose(falling["1 actor/lr"], 0.01 * (1 + 2 / 3 + 1 / 3 + 0) / 4)


RUN = ("train={num_steps: 3, eval_interval: 1}", "observe.num_samples=1")


@pytest.mark.parametrize("metric", ["val/reward/mean", "val/response_length/mean"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_best_checkpoints_stay_beside_the_newest(metric, count):
    kept = f"checkpoint={{interval: 1, keep_last: 1, keep_best: {count}, best_metric: {metric}}}"
    facts = files(*RUN, kept)
    ranked = sorted(((line[metric], line["step"]) for line in facts["metrics"] if metric in line), reverse=True)
    assert len(ranked) == 4
    best = {step for _, step in ranked[:count]}
    assert facts["checkpoints"] == [f"step-{step:08d}" for step in sorted(best | {3})]
