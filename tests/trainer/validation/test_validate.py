"""A good config passes, and all broken rules are told at once."""

import pytest

from mrl.errors import UserError
from mrl.trainer.validation.parallel import build_parallel_layout
from mrl.trainer.validation.validate import check, check_config
from tests.trainer.validation.runs import ARCH, make, refusal


def test_a_good_config_passes():
    check(make(), ARCH, world_size=1, tokenizer_vocab_size=128)
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    more = ("parallel.virtual_pipeline_model_parallel_size=2", "parallel.sequence_parallel=true")
    config = make(*layout, *more, "rollout.tensor_model_parallel_size=4")
    check(config, ARCH, world_size=8, tokenizer_vocab_size=128)
    grid = build_parallel_layout(config, 8)
    assert (grid.tp, grid.pp, grid.vpp, grid.dp, grid.num_replicas) == (2, 2, 2, 2, 2)
    assert config.rollout.max_sequence_length == 24


def test_all_broken_rules_are_told_at_once():
    told = refusal(make("parallel.sequence_parallel=true", "rollout.max_model_len=20", "data.task=null"))
    assert told.startswith("The config has 3 errors:\n  - ")


def test_rules_that_need_no_model_come_without_one():
    with pytest.raises(UserError, match="sequence_parallel"):
        check_config(make("parallel.sequence_parallel=true"), world_size=1)
