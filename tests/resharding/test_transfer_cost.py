"""What a refit sends, against the copies of the plan that sends it."""

import pytest

from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.plan import make_plan
from mrl.resharding.transfer_cost import traffic

GRIDS = [
    ParallelLayout(1),
    ParallelLayout(4, rollout_tp=2),
    ParallelLayout(8, tp=2, pp=2, rollout_tp=4),
    ParallelLayout(8, tp=4, rollout_tp=2),
    ParallelLayout(8, pp=4, rollout_tp=8),
    ParallelLayout(8, tp=2, ep=4, etp=1, rollout_tp=4, rollout_ep=2),
    ParallelLayout(16, tp=2, pp=2, ep=2, etp=2, rollout_tp=8, rollout_ep=4),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("preset", ["qwen2_tiny", "qwen3_moe_tiny"])
@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
def test_it_is_what_the_plan_moves(preset, grid, gpus_per_node):
    arch = arch_from_preset(preset, {"num_attention_heads": 8, "num_key_value_heads": 2}, 101)
    sources = megatron_layouts(arch, grid, dtype="bfloat16", te=False)
    targets = native_layouts(arch, grid, "bfloat16")
    plan = make_plan(sources, targets, host_of=lambda rank: rank // gpus_per_node)
    found = traffic(sources, targets, gpus_per_node)
    same_node = [bytes_ for (a, b), bytes_ in plan.link_bytes.items() if a // gpus_per_node == b // gpus_per_node]
    assert found.total.local == plan.bytes_local
    assert found.total.intra_node == sum(same_node)
    assert found.total.intra_node + found.total.inter_node == plan.bytes_moved == plan.lower_bound_bytes
    assert found.full_gather_bytes >= plan.bytes_moved or grid.tp == grid.pp == 1


def test_a_gather_of_whole_tensors_brings_each_rank_all_that_it_lacks():
    arch = arch_from_preset("llama_tiny", {}, 128)
    grid = ParallelLayout(4, tp=4, rollout_tp=4)
    sources = megatron_layouts(arch, grid, dtype="bfloat16", te=False)
    found = traffic(sources, native_layouts(arch, grid, "bfloat16"), 4)
    matrices = 2 * 128 * 64 + arch.num_layers * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert found.full_gather_bytes == 4 * (matrices - matrices // 4) * 2


def test_thousands_of_ranks_share_the_work():
    arch = arch_from_preset("qwen3_30b_a3b", {"num_hidden_layers": 8}, None)
    grid = ParallelLayout(4096, tp=2, pp=4, ep=8, etp=1, rollout_tp=8, rollout_ep=8)
    sources = megatron_layouts(arch, grid, dtype="bfloat16", te=True)
    found = traffic(sources, native_layouts(arch, grid, "bfloat16"), 8)
    assert found.total.inter_node > 0
    assert len(found.shares) < 64
