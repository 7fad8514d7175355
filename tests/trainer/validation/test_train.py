"""Steps that cannot be made are refused."""

import pytest

from tests.trainer.validation.runs import make, refusal

RULES = [
    # overrides, ranks, what the message says
    (["train.batch_size=10", "train.minibatch_size=4"], 1, "train.minibatch_size=4 does not divide"),
    (["train.batch_size=1", "rollout.n=2"], 4, "is smaller than the data-parallel size 4"),
    (["train.warm_start.num_steps=1", "train.warm_start.batch_size=2"], 4, "train.warm_start.batch_size=2 is below"),
    (["train.num_steps=0"], 1, "nothing would run"),
    (["actor.lr=0.01", "actor.min_lr=0.1", "actor.lr_schedule=cosine"], 1, "actor.min_lr=0.1 is above actor.lr"),
    (["actor.lr_schedule=linear", "actor.lr_warmup_steps=100"], 1, "leaves none of the run's 100 optimizer steps"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)
