"""Models that are not there, or do not fit their tokenizer, are refused."""

import pytest

from mrl.trainer.validation.validate import check
from tests.trainer.validation.runs import ARCH, make, refusal

RULES = [
    # overrides, ranks, what the message says
    (["model.path=nowhere"], 1, "both of model.path and model.preset"),
    (["model.path=nowhere", "model.preset=null"], 1, "model.path=nowhere is neither a folder"),
    (["model.preset=null"], 1, "neither of model.path and model.preset"),
    (["model.tokenizer=null"], 1, "A preset has no tokenizer"),
    (["reference.path=nowhere", "algorithm.kl_in=loss"], 1, "reference.path=nowhere is not a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    assert "has ids up to 128, but the model has embeddings for only 128" in refusal(make(), tokenizer_vocab_size=129)


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_bfloat16_is_allowed_on_a_cpu(name):
    config = make(f"run.device={name}", "model.dtype=bfloat16")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12)
