"""verl's asynchronous trainers and recipes become runs that sample as far ahead, or say why not."""

from dataclasses import replace

import pytest
import yaml

from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate
from mrl.config.config import Config, load
from mrl.config.keys import dotted_keys
from mrl.config.verl_keys.translated_keys import is_harmless, verdict
from mrl.config.verl_keys.verl_async import MAPS, MISSING, MOOT, RECIPES
from mrl.rollout.async_schedule import RolloutSchedule

GRPO = {"algorithm.adv_estimator": "grpo", "trainer.n_gpus_per_node": 4, "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16}  # fmt: skip
ROLLOUT = "actor_rollout_ref.rollout."
MODE, SAMPLER = "trainer.v1.trainer_mode", "trainer.v1.sampler."
THRESHOLD, STRATEGY = f"{SAMPLER}max_off_policy_threshold", f"{SAMPLER}max_off_policy_strategy"
SEPARATE = {MODE: "separate_async", f"{ROLLOUT}nnodes": 2, "trainer.v1.separate_async.parameter_sync_step": 4}
COLOCATED = {MODE: "colocate_async"}
WARMUP = {"separate": "trainer.v1.separate_async.num_warmup_batches",
          "colocate": "trainer.v1.colocate_async.num_warmup_batches"}  # fmt: skip


def made(given):
    """train, rollout, and what is told of the rest."""
    found = translate({**GRPO, **given})
    tree = yaml.safe_load(found.text)
    return tree["train"], tree["rollout"], found


def schedule(tmp_path, given):
    (tmp_path / "run.yaml").write_text(translate({**GRPO, **given}).text)
    config = load(tmp_path / "run.yaml")
    plan = RolloutSchedule.of(config)
    return replace(plan, num_steps=None), config


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1),
        ({WARMUP["separate"]: 3}, 3),
        ({WARMUP["separate"]: 1.5}, 2),
        ({WARMUP["separate"]: 0}, 0),
        ({WARMUP["separate"]: 3, THRESHOLD: 2}, 1),
        ({WARMUP["separate"]: 12, THRESHOLD: None}, 12),
        ({WARMUP["separate"]: 12, STRATEGY: "wait"}, 7),
    ],
)
def test_a_separate_trainer_begins_as_many_batches_ahead(given, steps):
    train, rollout, found = made({**SEPARATE, **given})
    assert (train["mode"], train["max_off_policy_steps"]) == ("async", steps)
    assert (rollout["nnodes"], rollout["n_gpus_per_node"]) == (2, 4)
    assert (train["batch_size"], train["minibatch_size"]) == (64, 16)  # parameter_sync_step updates in a step
    assert found.num_nodes == 3 and not [one for one in found.missing if "v1" in one]
    assert not [one for one in found.differs if "train.mode" in one]


def test_a_colocated_trainer_begins_beyond_a_batch_and_stops_for_the_updates(tmp_path):
    plan, config = schedule(tmp_path, COLOCATED)
    assert config.train.mode == "sync" and config.rollout.over_sample_rate == 1.0
    expected = RolloutSchedule(64, 1, extra=64, max_age=7, waits=False, by_parts=True)
    assert replace(plan, num_samples=1) == expected
    plan, config = schedule(tmp_path, {**COLOCATED, WARMUP["colocate"]: 0.5, THRESHOLD: None})
    assert (plan.extra, plan.max_age, config.rollout.over_age) == (32, None, "wait")
    plan, config = schedule(tmp_path, {**COLOCATED, WARMUP["colocate"]: 2, THRESHOLD: None})
    assert (plan.extra, plan.max_age) == (128, None)
    plan, _ = schedule(tmp_path, {**COLOCATED, THRESHOLD: 3, STRATEGY: "wait"})
    assert (plan.max_age, plan.waits) == (2, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**COLOCATED, f"{ROLLOUT}name": "vllm"}, f"{MODE}=colocate_async: only rollout.name=native can pause"),
        ({**COLOCATED, f"{ROLLOUT}multi_turn.enable": True}, "a conversation cannot be paused"),
        ({**COLOCATED, WARMUP["colocate"]: 2}, f"{WARMUP['colocate']}=2: at most 1 if"),
        ({**COLOCATED, THRESHOLD: 1, STRATEGY: "wait"}, f"{STRATEGY}=wait: each step would wait for all"),
        ({MODE: "fast"}, f"{MODE}=fast: mrl has sync, separate_async, colocate_async; sync is used"),
        ({**SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch": True}, "keeps its role for the entire"),
        ({f"{SAMPLER}custom_sampler.path": "s.py"}, "in the order of their prompts, or of completion"),
        ({**SEPARATE, f"{ROLLOUT}over_sample_rate": 0.1}, "prompts of later steps are started anyway"),
        ({f"{ROLLOUT}name": "vllm", f"{ROLLOUT}over_sample_rate": 0.1}, f"{ROLLOUT}over_sample_rate=0.1: only"),
    ],
)
def test_what_cannot_be_is_listed(given, told, tmp_path):
    found = translate({**GRPO, **given})
    assert [one for one in found.missing if told in one], found.missing
    (tmp_path / "run.yaml").write_text(found.text)
    load(tmp_path / "run.yaml")


def test_sampling_ahead_without_ranks_of_its_own_is_told_to_gain_nothing():
    train, rollout, found = made({**SEPARATE, f"{ROLLOUT}nnodes": 0})
    assert train["mode"] == "async" and "nnodes" not in rollout
    assert [one for one in found.differs if "sampling does not overlap with updates" in one]


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_other_engines_sample_ahead_on_ranks_of_their_own_too(engine):
    train, rollout, found = made({**SEPARATE, f"{ROLLOUT}name": engine, WARMUP["separate"]: 2})
    assert (train["mode"], train["max_off_policy_steps"], rollout["nnodes"]) == ("async", 2, 2)
    assert not [one for one in found.missing if "nnodes" in one or "v1" in one]


def test_the_older_trainer_takes_turns():
    train, rollout, _ = made({**SEPARATE, "trainer.use_v1": False})
    assert "mode" not in train and rollout["nnodes"] == 2


def test_prompts_that_are_aborted_begin_again_and_that_verl_reads_none_of_it_is_told():
    train, rollout, found = made({f"{ROLLOUT}over_sample_rate": 0.25})
    assert (rollout["over_sample_rate"], rollout["over_age"], train["max_off_policy_steps"]) == (0.25, "drop", 0)
    assert [one for one in found.differs if one.startswith(f"{ROLLOUT}over_sample_rate=0.25: verl 0.9.1 has the key")]


def test_experts_that_are_replayed_hold_every_response_to_one_version():
    replay = {f"{ROLLOUT}enable_rollout_routing_replay": True}
    train, _, found = made({**SEPARATE, WARMUP["separate"]: 3, **replay})
    assert train["max_off_policy_steps"] == 1
    assert [one for one in found.missing if "train.max_off_policy_steps=1 is used" in one]
    train, rollout, found = made({**COLOCATED, **replay})
    assert "mode" not in train and "over_sample_rate" not in rollout
    assert [one for one in found.missing if one.startswith(f"{MODE}=")]


LINE = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.nnodes=4 "
    "trainer.n_gpus_per_node=8 rollout.nnodes=2 rollout.n_gpus_per_node=8"
)
FULLY = (
    f"python -m verl.experimental.fully_async_policy.fully_async_main {LINE} data.train_batch_size=0 "
    "data.gen_batch_size=1 rollout.total_rollout_steps=204800 trainer.test_freq=20 "
    "async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 "
    "async_training.require_batches=4 async_training.partial_rollout=True"
)
ONE = f"python3 -m verl.experimental.one_step_off_policy.main_ppo {LINE} data.train_batch_size=512"


@pytest.mark.parametrize(("words", "steps"), [(FULLY, 400), (ONE, None)], ids=["fully_async", "one_step_off"])
def test_a_recipe_is_one_step_off_on_ranks_of_its_own(words, steps, tmp_path):
    for given in (read_settings(words.split()), read_settings([script(tmp_path, words)])):
        found = translate(given)
        tree = yaml.safe_load(found.text)
        train = tree["train"]
        assert (train["mode"], train["max_off_policy_steps"]) == ("async", 1)
        assert (train["batch_size"], train["minibatch_size"]) == (512, 32) and train.get("num_steps") == steps
        assert tree["rollout"]["nnodes"] == 2 and found.num_nodes == 6
        assert tree["algorithm"]["rollout_correction"] == {"bypass_mode": True}  # the recipes' own default
        assert [one for one in found.missing if "async" in one or one.startswith("rollout.")] == []


def script(folder, words):
    (folder / "run.sh").write_text(f"set -x\n{words} $@\n")
    return str(folder / "run.sh")


def test_the_name_of_a_recipe_is_enough():
    words = ["algorithm.adv_estimator=grpo"]
    one, fully = (
        yaml.safe_load(translate(read_settings([f"recipe/{recipe}/{file}.py", *words])).text)
        for recipe, file in (("one_step_off_policy", "main_ppo"), ("fully_async_policy", "fully_async_main"))
    )
    assert one["rollout"]["nnodes"] == fully["rollout"]["nnodes"] == 1
    assert one["train"]["batch_size"] == 1024 and fully["train"]["batch_size"] == 4 * 256
    assert one["train"]["mode"] == fully["train"]["mode"] == "async"


def test_a_threshold_of_none_is_no_step_ahead():
    found = translate(read_settings([*FULLY.split(), "async_training.staleness_threshold=0"]))
    assert yaml.safe_load(found.text)["train"]["max_off_policy_steps"] == 0


def test_every_key_of_the_recipes_has_a_verdict():
    for key in ("async_training.use_trainer_do_validate", "async_training.dynamic_schedule_policy", *MAPS, *MOOT):
        assert verdict(key.replace("*", "x")).text or MAPS[key][0] in dotted_keys(Config), key
    for key in MISSING:
        assert is_harmless(key, False) and verdict(key.replace("*", "x")).kind == "missing"
    assert all(verdict(key).kind == "maps" for defaults in RECIPES.values() for key in defaults)
