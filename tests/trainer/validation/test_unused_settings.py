"""Fields that are set and would be ignored are refused with the reason."""

import pytest

from mrl.config.config import Config, LoraConfig, RewardFunctionConfig
from mrl.config.peft_folder import ADAPTER_CONFIG, ADAPTER_FOLDER
from mrl.trainer.validation.lora import section_rules
from mrl.trainer.validation.validate import check, check_config
from tests.trainer.validation.runs import ARCH, VAL, changed, make, refusal

RULES = [
    # overrides, ranks, what the message says
    (["rollout.stop=['#']", "rollout.ignore_eos=true"], 1, "rollout.stop is set, but would have no effect"),
    (["reference.update_interval=5"], 1, "would have no effect because algorithm.kl_in is none"),
    (["data.task=null", "data.task_kwargs={a: 1}"], 1, "data.task_kwargs is set, but would have no effect"),
    (["parallel.num_layers_in_last_pipeline_stage=2"], 1, "because parallel.pipeline_model_parallel_size is 1"),
    (["actor.min_lr=0.0000001"], 1, "actor.min_lr is set, but would have no effect"),
    (["rollout.val_kwargs.temperature=0.5"], 1, "because rollout.val_kwargs.do_sample is false"),
    ([f"{VAL}.min_p=0.5"], 1, f"top_p or min_p is set, but would have no effect because {VAL}.do_sample is false"),
    ([f"{VAL}.do_sample=true", f"{VAL}.temperature=0", f"{VAL}.top_k=2"], 1, f"because {VAL}.temperature is 0"),
    (["data.prompt_key=question"], 1, "data.prompt_key is set, but would have no effect because data.task"),
    (["data.answer_key=solution"], 1, "data.answer_key is set, but would have no effect because data.task"),
    (["data.messages_key=talk"], 1, "data.messages_key is set, but would have no effect because data.task"),
    (["data.train_on_turns=last"], 1, "data.train_on_turns=last is set, but would have no effect because no step is"),
    (["data.overlong_responses=truncate_right"], 1, "would have no effect because no step is supervised"),
    (["train.early_stopping.mode=min"], 1, "because train.early_stopping.patience is 0"),
    (["checkpoint.best_metric=val/reward/mean"], 1, "because checkpoint.keep_best is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


@pytest.mark.parametrize("key", ["actor.lora", "critic.lora"])
@pytest.mark.parametrize("inner", [None, ADAPTER_FOLDER])
def test_of_a_wrong_folder_of_adapters_only_the_folder_is_named(key, inner, tmp_path):
    if inner is not None:
        (tmp_path / inner).mkdir()
        (tmp_path / inner / ADAPTER_CONFIG).write_text("{}")
    given = tmp_path if inner else tmp_path / "nowhere"
    (said,) = section_rules(key, LoraConfig(adapter_path=str(given), alpha=7.0), Config())
    assert said.startswith(f"{key}.adapter_path='{given}' has no {ADAPTER_CONFIG}.")
    assert (f"'{tmp_path / ADAPTER_FOLDER}'" in said) is (inner is not None)


SUPERVISED = [
    (["train.minibatch_size=8"], 1, "train.minibatch_size=8 is set, but would have no effect because algorithm"),
    (["actor.ppo_epochs=2"], 1, "actor.ppo_epochs=2 is set, but would have no effect because algorithm"),
    (["rollout.temperature=0.7"], 1, "rollout.temperature=0.7 is set, but would have no effect because algorithm"),
    (["rollout.top_k=5"], 1, "rollout.top_k=5 is set, but would have no effect because algorithm"),
    (["train.batch_size=2"], 4, "A batch of 2 examples is smaller than the data-parallel size 4"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), SUPERVISED, ids=[rule[2][:30] for rule in SUPERVISED])
def test_what_supervised_steps_would_ignore_is_named(overrides, world_size, said):
    config = make("algorithm.name=sft", *overrides)
    assert said in refusal(config, world_size, learns_from="responses")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12)  # steps that sample have a use for them


def test_a_batch_that_is_its_only_minibatch_is_no_mistake():
    config = make("algorithm.name=sft", "train.batch_size=8", "train.minibatch_size=8")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12, learns_from="responses")


def test_rewards_that_all_weigh_nothing_are_refused_and_one_of_several_is_only_measured():
    both = [RewardFunctionConfig(weight=0.0), RewardFunctionConfig(name="length", weight=0.5)]
    check_config(changed(make(), "reward.functions", both), world_size=1)
    assert "every weight is 0" in refusal(changed(make(), "reward.functions", both[:1]))
