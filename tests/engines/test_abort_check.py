"""A generation is abandoned by all ranks of a replica after the same step, and the engine is none the worse for it."""

import torch
import torch.distributed as dist

from mrl.engines._abort_check import CHECK_INTERVAL
from mrl.engines.base import SamplingConfig
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts
from tests.ranks import run_ranks

SAMPLING = SamplingConfig(n=2, max_tokens=3 * CHECK_INTERVAL, temperature=0.9, ignore_eos=True)
LENGTHS = (5, 9)


def told_on_one_rank(folder):
    engine = make_engine(folder, tp_group=dist.group.WORLD)
    expected = [rollout.response_ids for rollout in engine.generate(make_prompts(LENGTHS), SAMPLING)]
    engine.abort_requested = lambda: dist.get_rank() == 1
    abandoned = engine.generate(make_prompts(LENGTHS), SAMPLING)
    steps = engine.stats()["decode_steps"]
    engine.abort_requested = lambda: False
    again = [rollout.response_ids for rollout in engine.generate(make_prompts(LENGTHS), SAMPLING)]
    return len(abandoned), steps, again == expected


def test_all_ranks_of_a_replica_leave_when_one_was_told(tmp_path):
    (first, second) = run_ranks(2, told_on_one_rank, make_checkpoint(tmp_path))
    assert first == second == (0, CHECK_INTERVAL - 1, True)


def test_a_rank_alone_leaves_at_once(tmp_path):
    torch.set_num_threads(1)
    engine = make_engine(make_checkpoint(tmp_path))
    engine.abort_requested = lambda: True
    assert engine.generate(make_prompts(LENGTHS), SAMPLING) == []
    assert engine.stats()["prefill_tokens"] == 0
