"""A critic that cannot be, or settings of one that is not there, are refused."""

from dataclasses import replace

import pytest

from mrl.errors import UserError
from mrl.models.base import critic_of
from mrl.models.presets import arch_from_preset
from mrl.trainer.run_plan import check_run
from mrl.trainer.validation.critic import check_critic, critic_config
from mrl.trainer.validation.parallel import build_parallel_layout
from tests.trainer.validation.runs import ARCH, PP, TP, make

CRITIC = critic_of(ARCH)
MIXTURE = critic_of(arch_from_preset("qwen2_moe_tiny", {}, None))


def refusal(config, critic, world_size=1):
    with pytest.raises(UserError) as error:
        check_critic(config, ARCH, critic, build_parallel_layout(config, world_size))
    return str(error.value)


@pytest.mark.parametrize("given", ["critic.lr=0.1", "critic.path=folder", "critic.param_offload=true"])
def test_without_a_critic_its_settings_are_refused(given):
    key = given.partition("=")[0]
    assert f"{key} is set, but would have no effect because algorithm.name=grpo has no critic" in refusal(
        make(given), None
    )


def test_without_a_critic_its_warmup_is_refused():
    assert "train.critic_warmup is set, but would have no effect" in refusal(make("train.critic_warmup=3"), None)


RULES = [
    # overrides, critic, ranks, what the message says
    (["critic.min_lr=1"], CRITIC, 1, "critic.min_lr=1 is above critic.lr"),
    (["critic.min_lr=0.000001"], CRITIC, 1, "would have no effect because critic.lr_schedule is constant"),
    (["critic.lr_schedule=linear", "critic.lr_warmup_steps=100"], CRITIC, 1, "none of the run's 100 optimizer"),
    (["train.critic_warmup=100"], CRITIC, 1, "leaves none of train.num_steps=100"),
    (["critic.path=x"], replace(CRITIC, vocab_size=7), 1, "the critic reads the actor's tokens"),
    (["critic.path=x"], MIXTURE, 1, "is an MoE model and the other is dense"),
    (["critic.path=x"], replace(CRITIC, max_position_embeddings=20), 1, "positions for 20 tokens, fewer than the 24"),
    (["critic.path=x", f"{PP}=2"], replace(CRITIC, num_layers=3), 2, "does not divide the model's 3 layers"),
    (["critic.path=x", f"{TP}=2"], replace(CRITIC, num_heads=3, num_kv_heads=3), 2, "critic.path=x: "),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "critic", "world_size", "said"), RULES, ids=[rule[3] for rule in RULES])
def test_a_broken_rule_is_named(overrides, critic, world_size, said):
    assert said in refusal(make("algorithm.name=ppo", *overrides), critic, world_size)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.critic_warmup=100"], "leaves none of train.num_steps=100 to train the actor"),
        (["train.num_epochs=0.5", "train.critic_warmup=1"], "leaves none of train.num_steps=1 to train the actor"),
        (["critic.lr_schedule=linear", "critic.lr_warmup_steps=100"], "none of the run's 100 optimizer steps"),
    ],
)
def test_rules_hold_for_the_steps_that_the_data_or_the_default_gives(overrides, said):
    asked = ["train.num_steps=null", "data.task_kwargs={num_train: 64}", "model.tokenizer=char:0123456789<>+#"]
    with pytest.raises(UserError) as error:
        check_run(make("algorithm.name=ppo", *asked, *overrides), 1)
    assert said in str(error.value)


def test_a_critic_is_planned_as_an_actor_with_its_own_rates():
    config = make("critic.lr=0.5", "critic.param_offload=true", "actor.ppo_epochs=3", "train.critic_warmup=2")
    own = critic_config(config)
    assert (own.actor.lr, own.actor.param_offload, own.actor.ppo_epochs) == (0.5, True, 3)
    assert own.actor.max_tokens_per_microbatch == config.actor.max_tokens_per_microbatch
    assert own.train.critic_warmup == 0 and critic_config(make("critic.ppo_epochs=2")).actor.ppo_epochs == 2
