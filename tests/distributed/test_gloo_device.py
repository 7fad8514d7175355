"""All groups of a rank share one gloo device: its thread wakes up a hundred times a second."""

from pathlib import Path

import torch
import torch.distributed as dist

from mrl.megatron import parallel_state
from tests.megatron.actors import LAYOUTS
from tests.ranks import run_ranks


def loops_and_sum():
    groups = parallel_state.initialize(LAYOUTS["tp2_pp2"], seed=1)
    own = torch.ones(3) * dist.get_rank()
    dist.all_reduce(own, group=groups.tp)
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop"), own.tolist()


def test_one_device_for_all_groups_of_a_rank():
    found = run_ranks(4, loops_and_sum)
    assert [loops for loops, _ in found] == [1] * 4
    assert [total for _, total in found] == [[1.0] * 3] * 2 + [[5.0] * 3] * 2
