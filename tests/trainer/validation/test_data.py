"""Data that is not there, and evaluations without any, are refused."""

import pytest

from tests.trainer.validation.runs import make, refusal

RULES = [
    # overrides, ranks, what the message says
    (["data.task=null"], 1, "no training prompts"),
    (["data.train_files=[a.jsonl]"], 1, "generates its own rows"),
    (["data.task=null", "data.train_files=[a.jsonl]"], 1, "data.train_files: 'a.jsonl' does not exist"),
    (["data.chat_template=a.jinja"], 1, "data.chat_template='a.jinja' does not exist"),
    (["reward.functions=[]"], 1, "No response would have a reward"),
    (["data.task=null", "train.eval_interval=5"], 1, "train.eval_interval=5 needs held-out prompts"),
    (["checkpoint.keep_best=1"], 1, "needs evaluations to rank checkpoints"),
    (["train.early_stopping.patience=1"], 1, "counts evaluations. Set train.eval_interval"),
    (["train.early_stopping.metric=loss"], 1, "train.early_stopping.metric=loss is not an evaluation metric"),
    (["checkpoint.best_metric=loss"], 1, "checkpoint.best_metric=loss is not an evaluation metric"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files", "data.chat_template"])
def test_a_mistyped_file_is_offered_the_nearest(key, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    for typed, is_near in (("data/trian.jsonl", True), ("dta/train.jsonl", True), ("data/zzz", False)):
        path = str(tmp_path / typed)
        value = f"{key}={path}" if key == "data.chat_template" else f"{key}=['{path}']"
        said = refusal(make("data.task=null", "data.train_files=[a.jsonl]", value), 1)
        assert (f"Did you mean '{tmp_path / 'data' / 'train.jsonl'}'?" in said) == is_near, typed
